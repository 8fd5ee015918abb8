//! What crosses the network: scripts sent to nodes, and wake-ups that come back.
//!
//! This module knows no lease, kind or owner. Outside of it, no code names the client library,
//! except the constructors of [`Locks`](crate::Locks) and the sources of errors.

mod batcher;
#[cfg(feature = "cluster")]
mod cluster;
mod connecting;
mod connection;
mod endpoint;
mod error_replies;
mod failure;
mod handshake;
mod in_flight;
mod late_notifications;
#[cfg(feature = "cluster")]
mod masters;
mod node;
mod outage;
mod quorum;
mod request;
mod script;
#[cfg(feature = "cluster")]
mod seeds;
#[cfg(feature = "sentinel")]
mod sentinel;
mod server_clock;
mod shared_connection;
mod spoilt_keys;
mod transport;
mod wakeups;

pub(crate) use endpoint::{Endpoint, WakeupEndpoint};
pub(crate) use failure::{Failure, NodeReply};
pub(crate) use handshake::Membership;
pub(crate) use in_flight::InFlight;
pub(crate) use node::Node;
pub(crate) use quorum::{HoldCount, Nodes, Stragglers, Vote, Votes, WaitFor, median_clock};
pub(crate) use script::{Answer, Call, Reply, Script, Word};
#[cfg(feature = "cluster")]
pub(crate) use seeds::Seeds;
#[cfg(feature = "sentinel")]
pub(crate) use sentinel::SentinelMaster;
pub(crate) use transport::{Certificates, provide_cryptography, with_certificates, with_settings};
pub(crate) use wakeups::{Mailbox, WakeupSubscription};
