//! [`NestedHold`]: a hold that calls of one owner have together: a nested one costs no round trip.

use std::sync::{Arc, Weak};

use super::client::{Client, NestedKey};
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::owned_lease::{OwnedLease, released_after};
use crate::error::{Context, Error, Operation};
use crate::wire::Together;

/// A hold with one or more guards. The last guard releases it.
pub(crate) struct NestedHold {
    hold: OwnedLease,
    // Dropped after the hold: until then a task may find it, and find that it is lost.
    _entry: Entry,
}

struct Entry {
    client: Arc<Client>,
    key: NestedKey,
}

impl NestedHold {
    /// From now on, other calls of the same owner find this hold.
    pub(super) fn begin(request: &LockRequest, hold: OwnedLease) -> Arc<NestedHold> {
        let (client, key) = (Arc::clone(&request.client), key(request));
        let nested = Arc::new(NestedHold { hold, _entry: Entry { client, key: key.clone() } });
        let found = Arc::downgrade(&nested);
        request.client.nested_holds.lock().insert(key, found);
        nested
    }

    /// The valid hold that this client has for the same owner, if there is one.
    pub(super) fn find(request: &LockRequest) -> Result<Option<Arc<NestedHold>>, Error> {
        let found = request.client.nested_holds.lock().get(&key(request)).and_then(Weak::upgrade);
        let nested = found.and_then(|found| found.downcast::<NestedHold>().ok());
        let Some(nested) = nested.filter(|nested| !nested.lease().is_lost()) else { return Ok(None) };
        // The count includes this one.
        let depth = u32::try_from(Arc::strong_count(&nested) - 1).unwrap_or(u32::MAX);
        if depth >= request.options.max_depth {
            return Err(Error::TooDeep { context: request.context(), depth });
        }
        Ok(Some(nested))
    }

    pub(super) fn lease(&self) -> &Lease {
        self.hold.lease()
    }

    /// The lease of all guards ends.
    pub(super) fn leak(&self) {
        self.hold.leak();
    }

    /// The hold, if it has no other guard.
    pub(super) fn into_sole(self: Arc<NestedHold>) -> Result<OwnedLease, Arc<NestedHold>> {
        Arc::try_unwrap(self).map(|NestedHold { hold, _entry }| hold)
    }

    /// Releases the hold if this was its last guard.
    pub(super) async fn release(self: Arc<NestedHold>, together: Option<&Together>) -> Result<(), Error> {
        let lease = self.lease().clone();
        let end = lease.end();
        match (Arc::into_inner(self), end) {
            (Some(NestedHold { hold, _entry }), _) => hold.release(together).await,
            (None, Some(end)) => released_after(&lease, end, Context::of(Operation::Release, lease.name())),
            (None, None) => Ok(()),
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut holds = self.client.nested_holds.lock();
        // A newer hold may have taken its place.
        if holds.get(&self.key).is_some_and(|found| found.strong_count() == 0) {
            holds.remove(&self.key);
        }
    }
}

fn key(request: &LockRequest) -> NestedKey {
    (request.name.clone(), request.owner.clone())
}
