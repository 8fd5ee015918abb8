//! What crosses the network: scripts sent to nodes, and wake-ups that come back.
//!
//! Nothing here knows what a lease, a kind or an owner is, and nothing outside names the client library,
//! except the constructors of [`Locks`](crate::Locks) and the sources of errors.

#[cfg(feature = "cluster")]
mod cluster;
mod companions;
mod connection;
mod crowd;
mod dial;
mod ear;
mod facts;
mod failure;
mod floor;
mod greeting;
mod link;
mod loading;
#[cfg(feature = "simulation")]
pub(crate) mod memory;
mod node;
mod nodes;
mod refusal;
mod reply;
mod roster;
mod script;
#[cfg(feature = "sentinel")]
mod sentinel;
mod settings;
mod strays;
mod subscriber;
mod votes;
mod wake;

#[cfg(all(feature = "cluster", feature = "pool"))]
pub(crate) use cluster::Seeds;
#[cfg(feature = "cluster")]
pub(crate) use cluster::cluster;
pub(crate) use dial::Dial;
pub(crate) use ear::Ear;
pub(crate) use facts::Facts;
pub(crate) use failure::Failure;
pub(crate) use node::Node;
pub(crate) use nodes::{Answered, Answers, Counted, Nodes, Until, middle};
pub(crate) use reply::{Answer, Reply};
pub(crate) use roster::Roster;
pub(crate) use script::{Call, Script};
#[cfg(feature = "sentinel")]
pub(crate) use sentinel::Watched;
pub(crate) use settings::{Certificates, provide_cryptography, with_certificates, with_tcp};
pub(crate) use votes::{Doubt, NodeSet, Stragglers, Vote, Votes};
pub(crate) use wake::{Mailbox, Wakeups};
