//! One server: wake-ups, the queue of requests, reserved tokens, dropped guards, worker processes,
//! refused writes.

mod combined_requests;
mod dropped_guards;
mod finished_work;
mod late_receivers;
mod processes;
mod random_turns;
pub mod reconnections;
mod request_queue;
mod reserved_tokens;
mod restored_queue;
mod revoked_turns;
mod script_loading;
mod time_limits;
mod wakeups;
mod write_refusals;
