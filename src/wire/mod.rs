//! What crosses the network: scripts sent to nodes, and wake-ups that come back.
//!
//! This module knows no lease, kind or owner. Outside of it, no code names the client library,
//! except the constructors of [`Locks`](crate::Locks) and the sources of errors.

mod batcher;
#[cfg(feature = "cluster")]
mod cluster;
mod connection;
mod deployment;
mod endpoint;
mod error_reply;
mod failure;
mod handshake;
mod mailboxes;
mod many;
#[cfg(feature = "simulation")]
pub(crate) mod memory;
mod node;
mod quorum;
mod replies;
mod script;
#[cfg(feature = "sentinel")]
mod sentinel;
mod token_floor;
mod wakeups;

#[cfg(all(feature = "cluster", feature = "pool"))]
pub(crate) use cluster::Seeds;
#[cfg(feature = "cluster")]
pub(crate) use cluster::cluster;
pub(crate) use deployment::Deployment;
pub(crate) use endpoint::{
    Certificates, Endpoint, WakeupEndpoint, provide_cryptography, with_certificates, with_tcp,
};
pub(crate) use failure::{Failure, NodeReplies, NodeReply};
pub(crate) use handshake::{Facts, Membership};
pub(crate) use mailboxes::Mailbox;
pub(crate) use many::ManyScript;
pub(crate) use node::Node;
pub(crate) use quorum::{HoldCount, Nodes, WaitFor, median_clock};
pub(crate) use replies::{Answer, InFlight, NodeSet, Reply, Stragglers, Vote, Votes};
pub(crate) use script::{Call, Script};
#[cfg(feature = "sentinel")]
pub(crate) use sentinel::SentinelMaster;
pub(crate) use wakeups::Wakeups;
