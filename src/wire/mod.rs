//! What crosses the network: scripts sent to nodes, and wake-ups that come back.
//!
//! Nothing here knows what a lease, a kind or an owner is, and nothing outside names the client library,
//! except the constructors of [`Locks`](crate::Locks) and the sources of errors.

mod batcher;
#[cfg(feature = "cluster")]
mod cluster;
mod companions;
mod connection;
mod endpoint;
mod facts;
mod failure;
mod handshake;
mod late_notifications;
mod membership;
#[cfg(feature = "simulation")]
pub(crate) mod memory;
mod node;
mod quorum;
mod refusal;
mod reply;
mod script;
mod script_loader;
#[cfg(feature = "sentinel")]
mod sentinel;
mod settings;
mod shared_connection;
mod subscriber;
mod token_floor;
mod votes;
mod wakeup_endpoint;
mod wakeups;

#[cfg(all(feature = "cluster", feature = "pool"))]
pub(crate) use cluster::Seeds;
#[cfg(feature = "cluster")]
pub(crate) use cluster::cluster;
pub(crate) use endpoint::Endpoint;
pub(crate) use facts::Facts;
pub(crate) use failure::Failure;
pub(crate) use membership::Membership;
pub(crate) use node::Node;
pub(crate) use quorum::{HoldCount, NodeReplies, NodeReply, Nodes, WaitFor, median_clock};
pub(crate) use reply::{Answer, Reply};
pub(crate) use script::{Call, Script};
#[cfg(feature = "sentinel")]
pub(crate) use sentinel::SentinelMaster;
pub(crate) use settings::{Certificates, provide_cryptography, with_certificates, with_tcp};
pub(crate) use votes::{InFlight, NodeSet, Stragglers, Vote, Votes};
pub(crate) use wakeup_endpoint::WakeupEndpoint;
pub(crate) use wakeups::{Mailbox, Wakeups};
