//! [`Kind`]: what differs from one kind of lock to another, as data.

use crate::error::{Context, Error};
use crate::name::Name;
use crate::options::Options;
use crate::wire::{Call, Script, answers};

/// A kind of lock: its name, its script, and what the wait loop must know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// What its key holds, human-readable.
    pub(crate) found: &'static str,
    /// Its requests name an owner. An owner that holds the lock may enter again, ahead of every
    /// waiter. Its `renew` must then keep what is left of the hold if it is asked for less: the
    /// client asks so without extending.
    pub(crate) has_owner: bool,
    pub(crate) queue: Queue,
    /// The refusals that not every kind's script sends.
    pub(crate) refusals: &'static [Refusal],
    /// How many attempts may hold the lock or wait for it at a time, where several may, unless it
    /// is what the script assumes for an empty word.
    pub(crate) capacity: Option<fn(&Options) -> Option<u32>>,
    pub(crate) script: &'static Script,
    pub(crate) verbs: Verbs,
    /// The word of a release that revokes the lock.
    pub(crate) force: &'static str,
}

impl Kind {
    /// What the nodes know about a lock of this kind.
    pub(crate) fn inspect(&self, name: &Name) -> Call {
        Call::new(self.script, self.verbs.inspect, name)
    }
}

/// The calls of a kind, named for errors: what follows the stroke is the verb of its script.
pub(crate) struct Verbs {
    pub(crate) acquire: &'static str,
    /// Polls for many waiters of one lock at once. Kinds whose tasks all wait in Redis have it.
    pub(crate) wait: Option<&'static str>,
    pub(crate) renew: &'static str,
    pub(crate) release: &'static str,
    pub(crate) inspect: &'static str,
}

/// A refusal of a script: its number in [`answers`], and the error for it.
pub(crate) type Refusal = (i64, fn(&Options, Context) -> Error);

/// What every kind refuses: another program wrote it.
pub(crate) const WITHOUT_TTL: &str = "a value without a TTL, which is no lock";

/// The refusal of every kind that has owners.
pub(crate) const TOO_DEEP: Refusal =
    (answers::TOO_DEEP, |options, context| Error::TooDeep { context, depth: options.max_depth });

/// Where the tasks of one client wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Inside the client: one of them waits in Redis for all.
    Inside,
    /// Inside the client, unless the request has an owner: the owner may hold what the tasks ahead
    /// of it wait for, and would deadlock with them.
    InsideUnlessOwned,
    /// Tasks without an owner share a hold, and one of them asks for all. The others wait in Redis
    /// each, since one release may admit all of them.
    Shared,
}
