//! [`ContendedLocks`]: the locks that a call for many locks would find in use.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use super::script::Request;

/// For how many seconds a lock counts as contended after a request for it had to be sent alone.
/// Whole seconds are compared, so it is up to one more.
const CONTENDED_SECONDS: u64 = 1;
/// The bits of a slot that hold a time.
const TIME_BITS: u32 = 24;

/// The locks that were not free lately: combining requests for them would only add a round trip.
/// Of bounded size: of two locks that share a slot, the later one is remembered.
#[derive(Debug)]
pub(super) struct ContendedLocks {
    start: Instant,
    /// The hash of a lock, with the second in which it was seen in place of the lowest bits.
    slots: Box<[AtomicU64]>,
}

impl ContendedLocks {
    pub(super) fn new() -> ContendedLocks {
        ContendedLocks { start: Instant::now(), slots: (0..1024).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn note(&self, request: &Request) {
        let (slot, hash) = self.slot(request);
        slot.store(hash | self.now(), Ordering::Relaxed);
    }

    pub(super) fn contain(&self, request: &Request) -> bool {
        let (slot, hash) = self.slot(request);
        let seen = slot.load(Ordering::Relaxed);
        seen != 0 && seen >> TIME_BITS == hash >> TIME_BITS && self.now() - (seen ^ hash) <= CONTENDED_SECONDS
    }

    fn slot(&self, request: &Request) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        request.lock().hash(&mut hasher);
        let hash = hasher.finish();
        let place = hash as usize % self.slots.len();
        (&self.slots[place], hash >> TIME_BITS << TIME_BITS)
    }

    /// Seconds since the start, from 1.
    fn now(&self) -> u64 {
        self.start.elapsed().as_secs() + 1
    }
}
