//! What every held lock is: a lease with a deadline, waited for, renewed and released in one way.
//!
//! Nothing here names a kind of lock: a [`Kind`] is data, and what differs is in its script.

mod acquire;
mod attempt;
mod attempt_guard;
mod client;
mod cohort;
mod grant_clock;
mod held_work;
mod hold;
mod joint_hold;
mod keeper;
mod kept_leases;
mod kind;
#[allow(clippy::module_inception, reason = "the folder is named after its main type")]
mod lease;
mod lease_end;
mod lease_report;
mod local_queue;
mod lock_request;
mod manual_renewal;
mod new_connection;
mod owned_lease;
mod progress;
mod recent_locks;
mod release;
mod renewal;
mod reply_tally;
mod schedule;
mod shared_poll;
mod turn;
mod validity;
mod verbs;
mod wait_loop;

pub(crate) use acquire::{acquire, adopt, out_of_time, send_together, try_acquire, try_all};
pub(crate) use client::{Client, Servers};
pub(crate) use held_work::{conclude, release_after};
pub(crate) use hold::Hold;
pub(crate) use kind::{Kind, Queue, Refusal, TOO_DEEP, Verbs, WITHOUT_TTL};
pub use lease::Lease;
pub use lease_end::LeaseEnd;
pub(crate) use lock_request::LockRequest;
pub(crate) use release::decide;
