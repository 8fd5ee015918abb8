//! [`Kind`]: what differs from one kind of lock to another, as data.

use crate::options::Options;
use crate::wire::Script;

/// A kind of lock: its name, its scripts, and what the wait loop must know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// What its key holds, for people.
    pub(crate) found: &'static str,
    /// An owner that holds it may enter again, past everybody who waits.
    pub(crate) reenters: bool,
    /// Its requests name an owner.
    pub(crate) has_owner: bool,
    pub(crate) queue: Queue,
    /// How many may hold it or wait for it at a time, where several may.
    pub(crate) capacity: Option<fn(&Options) -> u32>,
    pub(crate) acquire: ScriptSet,
    pub(crate) renew: Script,
    pub(crate) release: Script,
    pub(crate) force: Script,
    pub(crate) inspect: Script,
}

/// A verb that has a script of its own for quorums.
pub(crate) struct ScriptSet {
    /// For one server, servers behind sentinels, and a cluster.
    pub(crate) server: Script,
    /// The client proposes the token.
    pub(crate) quorum: Script,
}

impl ScriptSet {
    pub(super) fn pick(&'static self, for_quorum: bool) -> &'static Script {
        if for_quorum { &self.quorum } else { &self.server }
    }
}

/// Where the tasks of one client wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Inside the client, where one of them waits in Redis for all.
    Inside,
    /// Inside, unless there is an owner: he may hold what those before him wait for.
    InsideUnlessOwned,
    /// Each in Redis, since one release may let in all of them.
    InRedis,
}
