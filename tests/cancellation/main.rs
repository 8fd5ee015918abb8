//! Cancellation: every future of the API is dropped at every point where it can be, with real
//! servers.
//!
//! The runtime's clock is paused, and the network is in memory and delivers one request or reply at
//! a time. So a test can take a future to its n-th step and drop it there, for every n until it is
//! done. The connections may then break or fall silent; no key, waiter or task may be left.

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
mod several;
mod steps;

mod holds;
mod lost_data;
mod node_failures;
mod quorum;
mod replicas;
mod split_grants;
mod waiting;
