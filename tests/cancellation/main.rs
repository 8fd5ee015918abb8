//! Every future of a lock is dropped at every point where it can be, in front of real servers.
//!
//! The clock stands still while anything moves, and what is sent and heard moves when it is let: so a future can be
//! taken to its n-th step and dropped there, for every n until it is done. Whatever becomes of the connection then,
//! nothing may be left.

#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]

#[path = "../it/support/binary.rs"]
mod binary;
mod connection;
#[path = "../it/support/locks.rs"]
#[allow(dead_code, missing_debug_implementations, reason = "shared with another test binary")]
mod locks;
mod network;
#[path = "../it/support/port.rs"]
mod port;
mod request_names;
mod scenario;
mod server;
mod steps;

mod holds;
mod node_failures;
mod quorum;
mod replicas;
mod split_grants;
mod waiting;
