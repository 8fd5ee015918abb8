//! [`adopt`]: continues a hold from its ticket. [`OwnedLease::into_ticket`] makes one.

use std::pin::pin;
use std::sync::Arc;

use super::attempt_guard::AttemptGuard;
use super::close::OpenCall;
use super::granted_again::last_token;
use super::hold::Hold;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::lock_request::{LockRequest, unless_closed};
use super::owned_lease::OwnedLease;
use super::release::{Decision, retry};
use crate::clock::Moment;
use crate::error::{Error, Operation};
use crate::measure::WakeReason;
use crate::owner::Owner;
use crate::ticket::{IntoTicketError, Ticket};
use crate::traces::acquiring;
use crate::wire::{Answer, Failure, WaitFor};

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

/// Continues the hold of a ticket as another attempt, of which at most one can: the server replaces
/// the attempt that has the hold, in one step.
///
/// # Cancel safety
/// Cancel safe: after a drop, the hold is released in the background if a request was sent.
pub(crate) async fn adopt(request: &LockRequest, ticket: &Ticket) -> Result<Hold, Error> {
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let mut adopting = pin!(async {
        let outcome = try_adopt(request, ticket).await.map(Hold::new);
        let woken = outcome.is_ok().then_some(WakeReason::AtOnce);
        (outcome, woken)
    });
    let traced = pin!(acquiring(request.described(), adopting.as_mut()));
    let hold = unless_closed(request, Operation::Adopt, traced).await?;
    Ok(hold.for_nested_calls(request))
}

async fn try_adopt(request: &LockRequest, ticket: &Ticket) -> Result<OwnedLease, Error> {
    let client = &request.client;
    let context = || client.context(Operation::Adopt, &request.name);
    let mut guard = AttemptGuard::new(request, 1 + ticket.spare_tokens);
    let attempt = Arc::clone(&guard.attempt);
    // Used, whatever becomes of this: a release takes back what follows it.
    attempt.note_token(ticket.fencing_token());
    let call = attempt.adopt(&ticket.attempt);
    // From here on, what the attempt gets is released if this fails or is dropped.
    guard.before_send();
    let sent = Moment::now();
    // Two that adopt the same hold may each have some nodes: only replies count.
    let may_trust_silence = false;
    let error = |failure: Failure| client.error(failure, context());
    let decided = retry(client, &attempt, &call, may_trust_silence).await;
    let Decision { answer, reply, .. } = decided.map_err(error)?;
    match answer {
        Answer::Final(1..) => {
            let until = sent + attempt.trusted_span(attempt.options.ttl);
            if Moment::now() >= until {
                return Err(Error::Lost { context: context(), reason: None });
            }
            let token = ticket.fencing_token().and_then(|token| attempt.token(token.get()));
            // A failover may have given the lock to another client and back: the counter of a lock
            // with one holder is then above its tokens.
            let own = attempt.last_own_token(token).filter(|_| attempt.kind.capacity.is_none());
            if let Some(own) = own.filter(|_| client.nodes.deployment.decides_alone()) {
                let (call, all_nodes) = (attempt.inspect(), client.nodes.all_nodes());
                let votes = client.nodes.ask(&call, all_nodes, &Arc::default(), WaitFor::All).await;
                match last_token(&votes.received) {
                    Some(last) if last > own => return Err(Error::Lost { context: context(), reason: None }),
                    Some(_) => {}
                    None => return Err(error(votes.failure())),
                }
            }
            let lease = Lease::new(attempt, token, sent, until, None);
            // Nodes that have not answered get the hold by a repair.
            Ok(OwnedLease::new(guard, lease))
        }
        Answer::Final(0) => Err(Error::Lost { context: context(), reason: None }),
        _ => Err(client.refusal(&attempt, &reply, context())),
    }
}
