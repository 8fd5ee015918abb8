//! Every future of a lock is dropped at every point where it can be, in front of real servers.
//!
//! The clock stands still while anything moves, and what is sent and heard moves when it is let: so a future can be
//! taken to its n-th step and dropped there, for every n until it is done. Whatever becomes of the connection then,
//! nothing may be left.

#[path = "../../../tests/it/support/binary.rs"]
#[allow(unreachable_pub, reason = "shared with a test binary")]
mod binary;
mod line;
#[path = "../../../tests/it/support/locks.rs"]
#[allow(unreachable_pub, dead_code, missing_debug_implementations, reason = "shared with a test binary")]
mod locks;
mod net;
#[path = "../../../tests/it/support/port.rs"]
#[allow(unreachable_pub, reason = "shared with a test binary")]
mod port;
mod server;
mod stage;
mod walk;
mod word;

mod holds;
mod minority;
mod quorum;
mod replicas;
mod splits;
mod waits;
