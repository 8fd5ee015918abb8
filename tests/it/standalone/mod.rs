//! One server: wake-ups, the client's request queue, processes, and a server that refuses writes.

mod processes;
mod request_queue;
mod restored_queue;
mod script_loading;
mod time_limits;
mod wakeups;
mod write_refusals;
