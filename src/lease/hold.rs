//! [`Hold`]: what the guard of any kind has.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use super::held_work::release_after;
use super::joint_hold::JointHold;
use super::kind::Kind;
use super::lease::Lease;
use super::lock_request::{LockRequest, shares};
use super::nested_hold::NestedHold;
use super::owned_lease::OwnedLease;
use crate::error::{Error, Operation};
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
