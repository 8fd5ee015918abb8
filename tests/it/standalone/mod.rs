//! One server: wake-ups, the client's request queue, worker processes, and refused writes.

mod combined_requests;
mod processes;
mod request_queue;
mod restored_queue;
mod script_loading;
mod time_limits;
mod wakeups;
mod write_refusals;
