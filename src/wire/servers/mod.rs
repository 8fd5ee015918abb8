//! Servers: connections to one server, to the master that sentinels name, or to a cluster, and the
//! requests of many callers that share them.
//!
//! Nothing here knows a lock, a script or a quorum. What is sent is a
//! [`PreparedCall`](super::request::PreparedCall), which `request.rs` combines with others, writes
//! and splits again; a test (`tests/conventions/sources.rs`) keeps it so.

mod batcher;
mod cluster;
mod connecting;
mod connection;
mod endpoint;
mod first_reply;
mod master;
mod masters;
mod refused_connection;
mod seeds;
mod sending;
mod sentinel;
mod slot_learning;
mod slot_table;
mod transport;

pub(super) use connecting::Connecting;
pub(super) use connection::Connection;
pub(crate) use endpoint::Endpoint;
pub(super) use refused_connection::EXPLAINING;
pub(crate) use seeds::Seeds;
pub(super) use sending::SentFlag;
pub(crate) use sentinel::SentinelMaster;
pub(crate) use transport::{Certificates, provide_cryptography, with_certificates, with_settings};
pub(super) use transport::{RepliesByServer, config, connect, set_name};
