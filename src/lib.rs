// The first definition of a link counts. Those of links.md lead into this documentation; those at
// the end of each page of the guide are for its readers on a git host.
#![doc = include_str!("../docs/links.md")]
//! Locks on Redis and Valkey that many processes share. Waiters are served in order, leases are
//! renewed while the work lasts, and each grant has a fencing token.
//!
//! ```no_run
//! # #[tokio::main]
//! # async fn main() -> Result<(), redlatch::Error> {
//! let locks = redlatch::Locks::open("redis://127.0.0.1/").await?;
//! let backup = locks.mutex("backup")?;
//! backup.run(async |_| { println!("no other process is here"); Ok(()) }).await
//! # }
//! ```
//!
//! | I want … | |
//! |---|---|
//! | one holder at a time | [`Mutex`], from [`Locks::mutex`] |
//! | calls that nest | [`ReentrantLock`], from [`Locks::reentrant`], with an [`Owner`] |
//! | many readers, or one writer | [`RwLock`], from [`Locks::rwlock`] |
//! | several locks at once | [`All`], from [`Locks::all`] |
//! | to run work and release whatever happens | [`Mutex::run`], and `run` of each kind |
//! | to hold a lock beyond one block | the guards: [`MutexGuard`] |
//! | to skip the work if the lock is held; to wait for so long | `try_lock`; `lock_timeout` |
//! | to know whether I still hold it | [`Lease::is_lost`], [`Lease::while_held`], [`Lease::lost`] |
//! | a resource that refuses late writes | [`FencingToken`]; [`fenced`] for Redis |
//! | one process that leads | [`Locks::elect`] |
//! | another process to go on with my hold | [`Ticket`] |
//! | a cluster, Sentinel, several servers, TLS | [`LocksBuilder`], from [`Locks::builder`] |
//! | other times and limits | [`Options`] |
//! | no async | `blocking`, behind the feature |
//! | to see its holder, and to revoke it | [`Mutex::inspect`], [`Mutex::force_release`] |
//! | to see what happens | [`Locks::events`], the features `tracing` and `metrics` |
//! | to end in order | [`Locks::close`] |
//!
//! [Ten minutes][ten-minutes] leads from `cargo add` to a protected job, a nested call and a cache;
//! the [`guide`] has a page for each subject. [Promises][promises] says what holds, and what does
//! not.
//!
//! | feature | | what it adds |
//! |---|---|---|
//! | `pool` | on | `LocksBuilder::pool` for `deadpool_redis` 0.23, re-exported |
//! | `suspend` | on | leases keep counting while a Linux machine sleeps (`CLOCK_BOOTTIME`) |
//! | `cluster` | | `LocksBuilder::cluster` |
//! | `sentinel` | | `LocksBuilder::sentinel` |
//! | `tls` | | `rediss://` with rustls; `LocksBuilder::tls` for private CAs and client certificates |
//! | `tracing` | | events for lost leases, outages, failed renewals and releases; spans for each call |
//! | `blocking` | | `redlatch::blocking`: the same locks for programs [without async][without-async] |
//! | `metrics` | | counters, gauges and histograms, for any recorder of the facade `metrics`: [the page][metrics] |
//! | `simulation` | | nothing for users: for the crate's own tests |
//!
//! The client library is `redis` 1.8, re-exported.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(all(
        feature = "blocking",
        feature = "cluster",
        feature = "metrics",
        feature = "pool",
        feature = "sentinel",
        feature = "tls",
        feature = "tracing"
    )),
    allow(dead_code, rustdoc::broken_intra_doc_links, reason = "for what is behind a feature that is off")
)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod all;
#[cfg(feature = "blocking")]
#[cfg_attr(docsrs, doc(cfg(feature = "blocking")))]
pub mod blocking;
mod clock;
mod deployment;
mod diagnosis;
mod error;
mod events;
pub mod fenced;
mod fencing;
mod guarded;
mod inspection;
mod labels;
mod lease;
mod locks;
mod measure;
mod mutex;
mod name;
mod options;
mod owner;
mod queries;
mod reentrant;
mod rwlock;
mod shorten;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
mod ticket;
mod traces;
mod transfer;
mod wire;

/// The guide: one page for each subject.
///
/// | to begin | |
/// |---|---|
/// | [Ten minutes](crate::guide::ten_minutes) | from `cargo add` to a protected job, a nested call and a cache |
/// | [Choosing a lock](crate::guide::choosing) | which lock for which need, and when to take none |
/// | [Coming from other libraries](crate::guide::coming_from) | Redisson, redsync, redis-py, rslock, DistributedLock |
/// | [From the folk recipe to this lock](crate::guide::recipes) | twenty common recipes, and what races in them |
///
/// | to build | |
/// |---|---|
/// | [Nested calls](crate::guide::nested_calls) | one owner for a call chain |
/// | [Several names at once](crate::guide::several_names) | a transfer between two accounts |
/// | [Across services](crate::guide::across_services) | the owner in a header |
/// | [Shared caches](crate::guide::caches) | many readers, one refresher; a job once a night |
/// | [Fencing your data](crate::guide::fencing) | SQL, Redis, object stores |
/// | [Waiting](crate::guide::waiting) | queues, notifications, limits, outages |
/// | [Errors](crate::guide::errors) | every error, and what to do |
/// | [Without async](crate::guide::without_async) | the same locks for programs that block |
///
/// | to run | |
/// |---|---|
/// | [Running it](crate::guide::running) | a checklist for production |
/// | [As a service](crate::guide::as_a_service) | systemd, containers, Kubernetes, a leader |
/// | [The program `redlatch`](crate::guide::cli) | for shells and cron jobs, and to look and to repair |
/// | [Metrics, spans and events](crate::guide::metrics) | what to watch, queries and alerts |
/// | [Connecting](crate::guide::connecting) | topologies, pools, TLS, names |
/// | [Topologies](crate::guide::topologies) | what each survives |
/// | [Rights](crate::guide::rights) | keys and ACL rules |
/// | [Other libraries on the same key](crate::guide::other_libraries) | which can share a lock with this one |
/// | [What can go wrong](crate::guide::faults) | from the symptom to the remedy |
///
/// | to judge | |
/// |---|---|
/// | [Promises](crate::guide::promises) | and their limits |
/// | [How safe](crate::guide::how_safe) | the fault checker's figures |
/// | [How fast](https://docs.rs/crate/redlatch/latest/source/docs/benchmarks.md) | beside eleven other libraries |
/// | [Testing](crate::guide::testing) | what is tested, what was found |
/// | [Design](crate::guide::design) | decisions, with their alternatives |
pub mod guide {
    macro_rules! pages {
        ($($name:ident $file:literal,)*) => {$(
            #[doc = include_str!("../docs/links.md")]
            #[doc = include_str!("../docs/images/embedded.md")]
            #[doc = include_str!(concat!("../docs/", $file))]
            pub mod $name {}
        )*};
    }

    pages! {
        across_services "across-services.md",
        as_a_service "as-a-service.md",
        caches "caches.md",
        choosing "choosing.md",
        cli "cli.md",
        coming_from "coming-from.md",
        connecting "connecting.md",
        design "design.md",
        errors "errors.md",
        faults "faults.md",
        fencing "fencing.md",
        how_safe "how-safe.md",
        metrics "metrics.md",
        nested_calls "nested-calls.md",
        other_libraries "other-libraries.md",
        promises "promises.md",
        recipes "recipes.md",
        rights "rights.md",
        running "running.md",
        several_names "several-names.md",
        ten_minutes "ten-minutes.md",
        testing "testing.md",
        topologies "topologies.md",
        waiting "waiting.md",
        without_async "without-async.md",
    }
}

#[cfg(feature = "pool")]
pub use deadpool_redis;
pub use redis;

pub use all::{All, AllGuard, Leases, Member};
pub use diagnosis::{Check, Finding, Verdict};
pub use error::{ConfigError, Context, Error, MembersError, NodeAnswer, NodeOutcome, NodeProblem, Operation};
pub use events::{Event, Events, LossReason};
pub use fencing::FencingToken;
pub use inspection::{Holder, Inspection, Mode, RwInspection};
pub use lease::{Lease, LeaseEnd};
pub use locks::{Locks, LocksBuilder, NodeState, NodeStatus, Source};
pub use mutex::{Mutex, MutexGuard};
pub use name::{Name, NameError, NameProblem};
pub use options::{Fencing, Nesting, Options, Renewal, RestartGuard, Wakeups};
pub use owner::{Owner, OwnerError};
pub use queries::HolderId;
pub use reentrant::{ReentrantGuard, ReentrantLock};
pub use rwlock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use ticket::{IntoTicketError, Ticket};
