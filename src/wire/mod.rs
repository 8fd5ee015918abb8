//! What crosses the network: scripts sent to nodes, and wake-ups that come back.
//!
//! This module knows no lease, kind or owner. Outside of it, no code names the client library,
//! except `fenced`, the constructors of [`Locks`](crate::Locks), and the sources of errors.

pub(crate) mod answers;
mod asking;
mod error_replies;
mod facts;
mod failure;
mod handshake;
mod late_notifications;
mod mailboxes;
mod node;
mod nodes;
mod outage;
mod request;
mod script;
mod script_failure;
mod server_clock;
mod servers;
mod shared_connection;
mod subscriber;
mod together;
mod votes;
mod wakeups;

pub(crate) use asking::{InFlight, WaitFor};
pub(crate) use failure::{Ability, Failure, NodeReply};
pub(crate) use handshake::Membership;
pub(crate) use mailboxes::{AnnouncedGrant, Mailbox};
pub(crate) use node::Node;
pub(crate) use nodes::{HoldCount, Nodes, median_clock};
pub(crate) use outage::LONGEST_PAUSE;
pub(crate) use script::{Answer, Call, Reply, Script, Word};
pub(crate) use servers::Seeds;
pub(crate) use servers::SentinelMaster;
pub(crate) use servers::{Certificates, Endpoint, provide_cryptography, with_certificates, with_settings};
pub(crate) use together::Together;
pub(crate) use votes::{Stragglers, Tally, Vote, Votes, replies_of};
pub(crate) use wakeups::WakeupSubscription;
