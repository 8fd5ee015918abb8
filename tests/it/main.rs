#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! The tests: one binary, private servers, one behaviour suite for every kind and every way to be woken.

mod builder;
mod burst;
mod clients;
mod closing;
mod dead_waiters;
mod deployments;
mod docs;
mod doctor;
mod errors;
#[cfg(all(feature = "cluster", feature = "sentinel"))]
mod failover;
mod holders;
mod house;
mod kinds;
mod labels;
mod lease_ends;
mod loading;
mod logs;
mod model;
mod names;
mod options;
mod processes;
mod quorum;
mod reentrant;
mod rights;
mod rwlock;
mod scripts;
#[cfg(all(feature = "pool", feature = "tls", feature = "tracing"))]
mod service;
mod suite;
#[allow(dead_code, reason = "the fault checker uses it as well")]
mod support;
#[cfg(all(feature = "cluster", feature = "sentinel", feature = "tls"))]
mod tls;
mod tokens;
mod wakeups;
mod worker;
