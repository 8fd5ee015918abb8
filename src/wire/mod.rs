//! What crosses the network: scripts sent to a node, and wake-ups that come back.
//!
//! Nothing here knows what a lease, a kind or an owner is, and nothing outside names the client library,
//! except the constructors of [`Locks`](crate::Locks) and the sources of errors.

mod crowd;
mod link;
mod node;
mod reply;
mod script;
mod wake;

pub(crate) use link::{Dial, client};
pub(crate) use node::Node;
pub(crate) use reply::{Answer, Failure, Reply};
pub(crate) use script::{Call, Script};
pub(crate) use wake::{Mailbox, Wakeups};
