#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! Integration tests, with private servers. `tests/README.md` says where each test is.

mod blocking;
#[cfg(all(feature = "cluster", feature = "sentinel"))]
mod cluster;
#[cfg(all(feature = "cluster", feature = "sentinel"))]
mod combined_requests;
mod dead_waiters;
mod errors;
mod fenced_sql;
mod fenced_write;
mod future_sizes;
mod insight;
mod inspection;
mod leader;
mod lease;
mod locks;
mod logs;
mod model;
mod name;
mod options;
mod outages;
mod owner;
mod quorum;
mod reentrant;
#[cfg(all(feature = "cluster", feature = "sentinel"))]
mod replicas;
mod rights;
mod rwlock;
mod scripts;
#[cfg(all(feature = "cluster", feature = "sentinel"))]
mod sentinel;
#[cfg(all(feature = "pool", feature = "tls", feature = "tracing"))]
mod service;
mod standalone;
mod stopwatch;
mod suite;
#[allow(dead_code, reason = "the fault checker uses it as well")]
mod support;
mod support_tests;
mod ticket;
mod worker;
mod wrong_type;
