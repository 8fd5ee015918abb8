//! Holds that tasks of one process share, so that a nested one costs no round trip.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::lock_request::LockRequest;
use super::owned_lease::{OwnedLease, released_after};
use crate::error::{Context, Error, Operation};
use crate::guarded::Guarded;
use crate::name::Name;
use crate::wire::Together;

type HoldsByOwner = Guarded<HashMap<(Name, String), Weak<NestedHold>>>;

/// The holds of a client that may be shared, by lock and owner.
#[derive(Clone, Debug, Default)]
pub(crate) struct NestedHolds(Arc<HoldsByOwner>);

impl NestedHolds {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Shares a hold: other tasks of the same owner find it.
    pub(crate) fn share(&self, request: &LockRequest, hold: OwnedLease) -> Arc<NestedHold> {
        let key = key(request);
        let entry = Entry { key: key.clone(), holds: Arc::clone(&self.0) };
        let shared = Arc::new(NestedHold { hold, _entry: Some(entry) });
        self.0.lock().insert(key, Arc::downgrade(&shared));
        shared
    }

    /// The valid hold that this client has for the same owner, if there is one.
    pub(crate) fn find(&self, request: &LockRequest) -> Result<Option<Arc<NestedHold>>, Error> {
        let found = self.0.lock().get(&key(request)).and_then(Weak::upgrade);
        let Some(shared) = found.filter(|shared| !shared.hold.lease().is_lost()) else { return Ok(None) };
        // The count includes this one.
        let depth = u32::try_from(Arc::strong_count(&shared) - 1).unwrap_or(u32::MAX);
        if depth >= request.options.max_depth {
            return Err(Error::TooDeep { context: request.context(), depth });
        }
        Ok(Some(shared))
    }
}

/// A hold with one or more guards. The last guard releases it.
#[derive(Debug)]
pub(crate) struct NestedHold {
    hold: OwnedLease,
    // Dropped after the hold: until then a task may find it, and find that it is lost.
    _entry: Option<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: (Name, String),
    holds: Arc<HoldsByOwner>,
}

impl NestedHold {
    /// A hold that no other task finds.
    pub(crate) fn of_one_guard(hold: OwnedLease) -> Arc<NestedHold> {
        Arc::new(NestedHold { hold, _entry: None })
    }

    pub(crate) fn hold(&self) -> &OwnedLease {
        &self.hold
    }

    /// The hold, if it has no other guard.
    pub(crate) fn into_sole(self: Arc<NestedHold>) -> Result<OwnedLease, Arc<NestedHold>> {
        Arc::try_unwrap(self).map(|NestedHold { hold, _entry }| hold)
    }

    /// Releases the hold if this was its last guard.
    pub(crate) async fn release(self: Arc<NestedHold>, together: Option<&Together>) -> Result<(), Error> {
        let lease = self.hold.lease().clone();
        let end = lease.end();
        match (Arc::into_inner(self), end) {
            (Some(NestedHold { hold, _entry }), _) => hold.release(together).await,
            (None, Some(end)) => released_after(end, Context::of(Operation::Release, lease.name())),
            (None, None) => Ok(()),
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut holds = self.holds.lock();
        // A newer hold may have taken its place.
        if holds.get(&self.key).is_some_and(|found| found.strong_count() == 0) {
            holds.remove(&self.key);
        }
    }
}

fn key(request: &LockRequest) -> (Name, String) {
    (request.name.clone(), request.owner.clone().unwrap_or_default())
}
