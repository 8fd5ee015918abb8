//! [`Hold`]: what the guard of any kind has, in its three forms. [`NestedHold`]: the form that
//! calls of one owner have together; a nested one costs no round trip.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};

use super::client::{Client, NestedKey};
use super::held_work::release_after;
use super::joint_hold::JointHold;
use super::kind::Kind;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::lock_request::{LockRequest, shares};
use super::owned_lease::{OwnedLease, released_after};
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::fencing::FencingToken;
use crate::options::Options;
use crate::owner::Owner;
use crate::ticket::{IntoTicketError, Ticket};
use crate::traces::{Grant, HoldSpan};
use crate::wire::Together;

/// A hold of its own, or a part in one that several guards of this client have. The last of them
/// releases it.
pub(crate) enum Hold {
    Own(OwnedLease),
    /// Of tasks without an owner.
    Joint(JointHold),
    /// Of calls of one owner.
    Nested(Arc<NestedHold>),
}

impl Hold {
    /// One that the server has granted. Other tasks may join it, if its options allow that.
    pub(crate) fn new(hold: OwnedLease) -> Hold {
        let attempt = hold.lease().attempt();
        if shares(attempt.kind, &attempt.options, attempt.owner.as_ref()) {
            Hold::Joint(JointHold::begin(hold, None))
        } else {
            Hold::Own(hold)
        }
    }

    /// The same hold. From now on, other calls of its owner enter it, if its options allow that.
    pub(super) fn for_nested_calls(self, request: &LockRequest) -> Hold {
        match self {
            Hold::Own(hold) if request.nests() => Hold::Nested(NestedHold::begin(request, hold)),
            other => other,
        }
    }

    /// A part in the hold that this client has for the same owner, without a request.
    pub(crate) fn enter(request: &LockRequest) -> Result<Option<Hold>, Error> {
        if !request.nests() {
            return Ok(None);
        }
        Ok(NestedHold::find(request)?.map(Hold::Nested))
    }

    /// The owner, if the hold was acquired with one.
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.lease().attempt().owner.as_ref()
    }

    pub(crate) fn describe(&self, guard: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct(guard);
        if let Some(owner) = self.owner() {
            text.field("owner", owner);
        }
        text.field("lease", self.lease()).finish()
    }

    pub(crate) fn lease(&self) -> &Lease {
        match self {
            Hold::Own(hold) => hold.lease(),
            Hold::Joint(part) => part.lease(),
            Hold::Nested(part) => part.lease(),
        }
    }

    /// Releases the hold and waits for the reply, unless other guards of this client still have it.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub(crate) async fn release(self, together: Option<&Together>) -> Result<(), Error> {
        match self {
            Hold::Own(hold) => hold.release(together).await,
            Hold::Joint(part) => part.release(together).await,
            Hold::Nested(part) => part.release(together).await,
        }
    }

    /// Runs `work` while the lease is valid, and releases it whatever the outcome.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping it drops `work`, and the lock is released in the background.
    pub(crate) async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        let lease = self.lease().clone();
        // Boxed: work that nests calls would make the future of the outer call larger each time.
        release_after(lease.while_held(Box::pin(work(lease.clone()))), self.release(None)).await
    }

    /// The hold is never released from now on: it ends with its TTL, once no task uses it.
    pub(crate) fn leak(self) {
        match self {
            Hold::Own(hold) => _ = hold.leak(),
            Hold::Joint(part) => part.leak(),
            Hold::Nested(part) => part.leak(),
        }
    }

    /// The hold, if no other guard of this client has a part in it; otherwise why it has to stay.
    fn into_sole(self, operation: Operation) -> Result<OwnedLease, IntoTicketError<Hold>> {
        let sole = match self {
            Hold::Own(hold) => Ok(hold),
            Hold::Joint(part) => part.into_sole().map_err(Hold::Joint),
            Hold::Nested(part) => part.into_sole().map_err(Hold::Nested),
        };
        sole.map_err(|hold| {
            let shared = || Error::SharedHold { context: hold.lease().context(operation) };
            let error = hold.lease().ended(operation).unwrap_or_else(shared);
            IntoTicketError::new(hold, error)
        })
    }

    /// See [`OwnedLease::into_ticket`].
    pub(crate) fn into_ticket(self) -> Result<Ticket, IntoTicketError<Hold>> {
        self.into_sole(Operation::Transfer)?.into_ticket().map_err(|kept| kept.map(Hold::Own))
    }

    /// See [`OwnedLease::convert`].
    pub(crate) async fn convert(
        self,
        verb: &'static str,
        kind: &'static Kind,
        options: Arc<Options>,
    ) -> Result<Hold, Error> {
        let hold = self.into_sole(Operation::Downgrade)?;
        let (client, context) = (Arc::clone(hold.client()), hold.lease().context(Operation::Downgrade));
        client.run(pin!(hold.convert(verb, kind, options)), || context).await.map(Hold::new)
    }
}

impl Grant for Hold {
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)> {
        match self {
            Hold::Own(hold) => Some((hold.lease().fencing_token(), &mut hold.span)),
            Hold::Joint(part) => Some((part.lease().fencing_token(), &mut part.span)),
            Hold::Nested(_) => None, // its first guard was granted it
        }
    }
}

impl OwnedLease {
    /// Ends the lease, and leaves the hold to the attempt that adopts the ticket. Fails if the
    /// lease has ended before.
    pub(super) fn into_ticket(self) -> Result<Ticket, IntoTicketError<OwnedLease>> {
        let (lease, left) = (self.lease().clone(), self.lease().until().since(Moment::now()));
        let ended = |end| lease.error(Operation::Transfer, end);
        if let Some(end) = lease.end() {
            return Err(IntoTicketError::new(self, ended(end)));
        }
        match self.leak() {
            LeaseEnd::Leaked => {}
            end => return Err(IntoTicketError::new(self, ended(end))),
        }
        let attempt = lease.attempt();
        let owner = attempt.kind.has_owner.then(|| Owner::from_word(&attempt.owner()).ok()).flatten();
        let spare = |_| attempt.spare_tokens();
        Ok(Ticket {
            name: lease.name().as_str().to_owned(),
            kind: attempt.kind.name.into(),
            attempt: attempt.text(),
            owner,
            token: lease.fencing_token(),
            spare_tokens: lease.fencing_token().map_or(0, spare),
            left_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

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
