//! What every held lock is: a lease with a deadline, waited for, renewed and released in one way.
//!
//! Nothing here names a kind of lock: a [`Kind`] is data, and what differs is in its scripts.

mod acquire;
mod acquire_round;
mod attempt;
mod client;
mod close;
mod deadline;
mod decision;
mod keeper;
mod kind;
#[allow(clippy::module_inception, reason = "the folder is named after its main type")]
mod lease;
mod local_queue;
mod lock_request;
mod owned_lease;
mod release;
mod renewal_tally;
mod schedule;
mod shared_hold;
mod trace;
mod waiter;

pub(crate) use acquire::{acquire, acquire_within, try_acquire};
pub(crate) use attempt::Attempt;
pub(crate) use client::{Client, Servers};
pub(crate) use decision::decide;
pub(crate) use kind::{Capacity, Kind, Queue, Refusal, ScriptSet, TOO_DEEP};
pub use lease::{Lease, LeaseEnd};
pub(crate) use lock_request::LockRequest;
pub(crate) use owned_lease::OwnedLease;
pub(crate) use shared_hold::SharedHold;
