//! [`Kind`]: what differs from one kind of lock to another, as data.

use crate::error::{Context, Error};
use crate::options::Options;
use crate::wire::{ManyScript, Script};

/// A kind of lock: its name, its scripts, and what the wait loop must know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// What its key holds, human-readable.
    pub(crate) found: &'static str,
    /// An owner that holds the lock may enter again, ahead of every waiter. Its `renew` must then
    /// keep what is left of the hold if it is asked for less: the client asks so without extending.
    pub(crate) may_reenter: bool,
    /// Its requests name an owner.
    pub(crate) has_owner: bool,
    pub(crate) queue: Queue,
    /// The refusals that only some kinds' scripts send.
    pub(crate) refusals: &'static [Refusal],
    /// How many attempts may hold the lock or wait for it at a time, where several may.
    pub(crate) capacity: Option<Capacity>,
    pub(crate) acquire: ScriptSet,
    pub(crate) acquire_many: ManyScript,
    pub(crate) renew: Script,
    pub(crate) release: Script,
    pub(crate) release_many: ManyScript,
    pub(crate) force: Script,
    pub(crate) inspect: Script,
}

/// How many attempts may hold a lock or wait for it.
pub(crate) struct Capacity {
    pub(crate) option: fn(&Options) -> u32,
    /// What the scripts assume where the argument is empty.
    pub(crate) default: u32,
}

/// A refusal of a script: its number, and the error for it.
pub(crate) type Refusal = (i64, fn(&Options, Context) -> Error);

/// The refusal of every kind that has owners.
pub(crate) const TOO_DEEP: Refusal =
    (-4, |options, context| Error::TooDeep { context, depth: options.max_depth });

/// A verb with two scripts. They differ in where the token is chosen.
pub(crate) struct ScriptSet {
    /// For one server, servers behind sentinels, and a cluster.
    pub(crate) server: Script,
    /// For nodes that decide by majority: the client proposes the token.
    pub(crate) proposing: Script,
}

impl ScriptSet {
    pub(super) fn pick(&'static self, proposes: bool) -> &'static Script {
        if proposes { &self.proposing } else { &self.server }
    }
}

/// Where the tasks of one client wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Inside the client: one of them waits in Redis for all.
    Inside,
    /// Inside the client, unless the request has an owner: the owner may hold what the tasks ahead
    /// of it wait for, and would deadlock with them.
    InsideUnlessOwned,
    /// Each task in Redis, since one release may admit all of them.
    InRedis,
}
