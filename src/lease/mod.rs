//! What every held lock is: a lease with a deadline, waited for, renewed and released in one way.
//!
//! Nothing here names a kind of lock: a [`Kind`] is data, and what differs is in its script.

mod acquire;
mod acquire_round;
mod adoption;
mod all_at_once;
mod attempt;
mod attempt_guard;
mod caller;
mod client;
mod close;
mod cohort;
mod connection_watch;
mod grant_clock;
mod granted_again;
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
mod local_wait;
mod lock_request;
mod manual_renewal;
mod nested_hold;
mod off_runtime;
mod outage_deadline;
mod owned_lease;
mod poll_budget;
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
mod waiter;

pub(crate) use acquire::{acquire, try_acquire};
pub(crate) use adoption::adopt;
pub(crate) use all_at_once::{out_of_time, send_together, try_all};
pub(crate) use client::{Client, Servers};
pub(crate) use held_work::{conclude, release_after};
pub(crate) use hold::Hold;
pub(crate) use kind::{Kind, Queue, Refusal, TOO_DEEP, Verbs, WITHOUT_TTL};
pub use lease::Lease;
pub use lease_end::LeaseEnd;
pub(crate) use lock_request::LockRequest;
pub(crate) use release::decide;
