//! [`RecentLocks`]: what a client remembers of locks for which none of its tasks waits any more.

use std::hash::{BuildHasher, RandomState};

use crate::clock::Moment;
use crate::name::Name;

/// For how many more holds without local waiters a lock is expected to have some.
const COMPETITION: u8 = 8;

/// A table of fixed size: the place of a lock is a part of the hash of its name.
pub(super) struct RecentLocks {
    places: Box<[RecentLock; 256]>,
    hasher: RandomState,
}

/// What is remembered of a lock, and of every other lock with the same part of the name's hash.
#[derive(Clone, Copy, Default)]
pub(super) struct RecentLock {
    /// For how many more holds competition is expected.
    competition: u8,
    /// The largest token that the server has granted.
    pub(super) last_token: u64,
    /// When this client last revoked a hold.
    pub(super) revoked_at: Option<Moment>,
}

impl Default for RecentLocks {
    fn default() -> RecentLocks {
        RecentLocks { places: Box::new([RecentLock::default(); 256]), hasher: RandomState::new() }
    }
}

impl RecentLocks {
    pub(super) fn of(&mut self, name: &Name) -> &mut RecentLock {
        &mut self.places[usize::from(self.hasher.hash_one(name).to_be_bytes()[0])]
    }
}

impl RecentLock {
    /// Whether tasks competed for the lock lately; notes whether they do now.
    pub(super) fn expects_others(&mut self, competes: bool) -> bool {
        let expects_others = self.competition > 0;
        self.competition = if competes { COMPETITION } else { self.competition.saturating_sub(1) };
        expects_others
    }
}
