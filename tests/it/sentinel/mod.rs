//! Redis Sentinel: failovers, and two masters at a time.

mod failover;
mod two_masters;
