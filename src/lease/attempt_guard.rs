//! [`AttemptGuard`]: the duty to undo an attempt, from before its first request on. [`Standing`]:
//! what there is to undo. [`acquire_round`]: a request to each node under that duty, and what their
//! replies amount to.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::{Attempt, QueueEntry};
use super::client::Client;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::reply_tally::{Busy, ProposalOutcome, ReplyTally, TokenProposals};
use super::schedule::Abandoned;
use crate::deployment::NodeSet;
use crate::error::{Context, Error, Operation};
use crate::wire::{Failure, Reply, Tally, Votes, WaitFor, replies_of};

/// What the nodes may have of an attempt, and so what must be undone when its guard is dropped.
///
/// ```text
///            before_send           record              hold
///  ┌─────┐              ┌───────┐           ┌─────────┐        ┌──────┐
///  │ New │ ───────────► │ Asked │ ────────► │ Waiting │ ─────► │ Held │
///  └──┬──┘              └───┬───┘ ◄──────── └────┬────┘        └───┬──┘
///     │                     │     before_send    │                 │
///     │ undo: nothing       │ undo: release, and │ undo: release   │ undo: release
///     │                     │ refuse requests    │ if queued or    │ leave, leak: nothing
///     │                     │ that arrive later  │ unknown         │
///     ▼                     ▼                    ▼                 ▼
///  ┌──────────────────────────────────────────────────────────────────┐
///  │                               Left                               │
///  └──────────────────────────────────────────────────────────────────┘
/// ```
///
/// A request that was dropped before it was written has no effect: `Asked` is then undone as what
/// it was before, `New` or `Waiting`. A release also refuses what arrives later if the effect of an
/// earlier request is unknown.
enum Standing {
    /// No request was sent.
    New,
    /// A request was sent, and its replies are not recorded yet: it may be granted anything.
    Asked { is_first: bool },
    /// All replies are recorded. It is queued if its requests queue it.
    Waiting,
    /// It has a lease.
    Held { has_queued: bool },
    /// Nothing is left to release, or the hold is meant to stay.
    Left,
}

/// Makes sure, from before the first request, that everything an attempt is granted is released: by
/// its owner or, when this is dropped, by the keeper.
pub(super) struct AttemptGuard {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    /// How its requests queue it, if they do. `None` once it has left the queue.
    pub(super) entry: Option<QueueEntry>,
    /// All nodes have granted it, not only a majority.
    pub(super) is_unanimous: bool,
    standing: Standing,
}

impl AttemptGuard {
    pub(super) fn new(request: &LockRequest, tokens: u32) -> AttemptGuard {
        let attempt = request.attempt().reserving(tokens);
        let (client, attempt) = (Arc::clone(&request.client), Arc::new(attempt));
        let is_unanimous = client.nodes.deployment.decides_alone();
        AttemptGuard { client, attempt, entry: None, is_unanimous, standing: Standing::New }
    }

    /// To be called before a request is sent: from then on it must be undone.
    pub(super) fn before_send(&mut self) {
        self.standing = Standing::Asked { is_first: matches!(self.standing, Standing::New) };
    }

    /// Records the replies to a request. If a majority has decided, the attempt has a lease, which
    /// is released on all nodes.
    pub(super) fn record(&mut self, votes: &Votes, has_decided: bool) {
        self.standing = Standing::Waiting;
        // A node that has not answered may still grant the lock, unnoticed.
        if !has_decided && votes.rest.is_some() {
            self.attempt.in_flight.mark_unknown();
        }
    }

    /// The attempt was granted, by all nodes or by a majority: from now on its lease is renewed.
    pub(super) fn hold(&mut self, lease: &Lease) {
        let has_queued = self.has_queued();
        // A granted attempt has left the queue; only a late delivery could queue it again.
        if self.is_unanimous && !self.attempt.in_flight.is_indeterminate() {
            self.entry = None;
        }
        self.attempt.note_token(lease.fencing_token());
        self.attempt.note_held();
        self.client.keeper.keep(lease, self.is_unanimous, self.entry.clone());
        if self.attempt.kind.has_owner {
            self.client.local_queues.announce_grant(&self.attempt.name, &self.attempt.owner());
        }
        self.standing = Standing::Held { has_queued };
    }

    /// Releases a grant that cannot be used: the attempt has ended.
    pub(super) fn abandon(&mut self) {
        self.attempt.in_flight.mark_unknown();
        self.undo();
    }

    /// Releases what some nodes granted and waits on. Returns false if the release may run later:
    /// it could revoke what the attempt is granted until then, so the attempt must not continue.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the keeper releases the grants.
    pub(super) async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        self.before_send();
        let (call, in_flight) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;
        self.standing = Standing::Waiting;
        !in_flight.is_indeterminate()
    }

    /// Nothing is left to release.
    pub(super) fn leave(&mut self) {
        self.expect_late_notifications();
        self.standing = Standing::Left;
    }

    /// Gives the duty to another guard.
    pub(super) fn hand_over(&mut self) -> AttemptGuard {
        let (client, attempt) = (Arc::clone(&self.client), Arc::clone(&self.attempt));
        let standing = mem::replace(&mut self.standing, Standing::Left);
        AttemptGuard { client, attempt, entry: self.entry.take(), is_unanimous: self.is_unanimous, standing }
    }

    /// The hold is meant to stay, until its TTL ends it: on each node that has it, also if it did
    /// not count that one, and so in each queue.
    pub(super) fn leak(&mut self) {
        self.standing = Standing::Left;
    }

    /// The operation, lock and server, for errors.
    pub(super) fn context(&self) -> Context {
        self.client.context(Operation::Acquire, &self.attempt.name)
    }

    /// The error of a request. An earlier request may have had an effect, even if this one had
    /// none.
    pub(super) fn error(&self, failure: Failure) -> Error {
        let failure = failure.with_effect_if(self.attempt.in_flight.is_indeterminate());
        self.client.error(failure, self.context())
    }

    /// Whether it was queued at some time.
    fn has_queued(&self) -> bool {
        match self.standing {
            Standing::New | Standing::Left => false,
            Standing::Asked { .. } | Standing::Waiting => self.entry.is_some(),
            Standing::Held { has_queued } => has_queued,
        }
    }

    /// Releases the lock at once if a server grants it to this attempt later. A server that was set
    /// back to an earlier state does that.
    fn expect_late_notifications(&self) {
        if self.has_queued() {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            self.client.wakeups.expect_late_notifications(attempt.id, move |node| {
                let (attempt, nodes) = (Arc::clone(&attempt), NodeSet::of([node]));
                let (has_lease, is_final, entry) = (false, false, None);
                keeper.abandon(Abandoned { attempt, has_lease, is_final, entry, nodes });
            });
        }
    }

    /// Has the keeper undo what the nodes may have of the attempt.
    fn undo(&mut self) {
        let is_unknown = self.attempt.in_flight.is_indeterminate();
        let is_withdrawn = self.attempt.in_flight.is_withdrawn();
        // What to release, if anything: `true` if requests that arrive later must be refused.
        let is_final = match self.standing {
            Standing::New | Standing::Left => return,
            Standing::Asked { is_first: true } if is_withdrawn && !is_unknown => return,
            Standing::Asked { .. } if !is_withdrawn => Some(true),
            Standing::Asked { .. } | Standing::Waiting => {
                (self.entry.is_some() || is_unknown).then_some(is_unknown)
            }
            Standing::Held { .. } => Some(is_unknown),
        };
        let has_lease = matches!(self.standing, Standing::Held { .. });
        self.leave();
        if let Some(is_final) = is_final {
            let (attempt, entry) = (Arc::clone(&self.attempt), self.entry.take());
            let nodes = self.client.nodes.all_nodes();
            self.client.keeper.abandon(Abandoned { attempt, has_lease, is_final, entry, nodes });
        }
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.undo();
    }
}

/// The outcome of one round.
pub(super) enum AcquireOutcome {
    Granted(Lease),
    Busy {
        free_in: Duration,
        /// If there is one clock.
        clock: Option<GrantClock>,
    },
    /// Some nodes granted the lock, but no majority; the others refused, or granted it to other
    /// attempts.
    NoMajority {
        by: NodeSet,
        /// If other attempts hold a majority: for how much longer, at most.
        taken_for: Option<Duration>,
    },
    /// Granted, but the reply took longer than the lease lasts. The grant is released.
    Expired,
    /// A later round may succeed.
    Failed(Failure),
    Refused(Error),
}

/// Sends one request to each node, and another one if the nodes do not agree on a token.
///
/// # Cancel safety
/// Dropped, the attempt is abandoned: what it was granted is released at once.
pub(super) async fn acquire_round(guard: &mut AttemptGuard) -> AcquireOutcome {
    let (client, attempt) = (Arc::clone(&guard.client), Arc::clone(&guard.attempt));
    if client.keeper.has_ended() {
        return AcquireOutcome::Refused(Error::RuntimeEnded { context: guard.context() });
    }
    let (nodes, subscription) = (&client.nodes, client.wakeups.subscription());
    if let Err(failure) = nodes.open(|| attempt.acquire(None, None)).await {
        return failed(guard, failure);
    }
    let mut proposals = TokenProposals::new(nodes.proposal(), attempt.options.fencing);
    let mut granted_before = NodeSet::default();
    loop {
        let proposed = proposals.proposed();
        let call = attempt.acquire(guard.entry.as_ref(), proposals.proposal);
        guard.before_send();
        let mut votes = nodes.ask(&call, nodes.all_nodes(), &attempt.in_flight, WaitFor::Majority(0)).await;
        let mut tally = ReplyTally::new(nodes, &attempt, &votes);
        if tally.is_undecided(proposed) {
            nodes.wait_for_rest(&mut votes, &call).await;
            tally = ReplyTally::new(nodes, &attempt, &votes);
        }
        let agreement = proposals.record(&tally);
        guard.record(&votes, tally.has_majority() && agreement != ProposalOutcome::NotGranted);
        let granted = tally.nodes.positive;
        match agreement {
            ProposalOutcome::Again => granted_before = granted_before.union(granted),
            ProposalOutcome::NotGranted => {
                // A node may grant one proposal, and fail or refuse at the next.
                if !granted_before.without(granted).is_empty() {
                    attempt.in_flight.mark_unknown();
                }
                return not_granted(guard, tally, votes, subscription);
            }
            ProposalOutcome::Granted(token) => {
                // The lease counts from when the first granted request was written: the time in the
                // client's queue does not use it up. A majority granted it, so there is one.
                let Some(sent) = tally.granted_since else {
                    return not_granted(guard, tally, votes, subscription);
                };
                let Some(lease) = Lease::granted(&attempt, attempt.token(token), sent) else {
                    guard.abandon();
                    return AcquireOutcome::Expired;
                };
                if proposed == Some(token) {
                    nodes.accepted(token);
                }
                guard.is_unanimous = granted == nodes.all_nodes();
                return AcquireOutcome::Granted(lease);
            }
        }
    }
}

fn failed(guard: &AttemptGuard, failure: Failure) -> AcquireOutcome {
    if failure.is_transient() {
        AcquireOutcome::Failed(failure)
    } else {
        AcquireOutcome::Refused(guard.error(failure))
    }
}

fn not_granted(
    guard: &mut AttemptGuard,
    tally: ReplyTally,
    votes: Votes,
    subscription: Option<u64>,
) -> AcquireOutcome {
    let (deployment, majority) = (votes.deployment, votes.deployment.majority());
    let Tally { positive: by, refused, unexpected, .. } = tally.nodes;
    let replied = tally.nodes.replied();
    // Whether without these nodes, the others that replied cannot grant the lock.
    let is_decided_by =
        |some: NodeSet| deployment.is_majority(replied) && !deployment.is_majority(replied.without(some));
    if is_decided_by(unexpected)
        && let Some((_, reply)) = replies_of(&votes.received, unexpected).next()
    {
        // A reply outside the contract may mean anything, including a grant.
        let error = guard.error(reply.unexpected());
        guard.abandon();
        return AcquireOutcome::Refused(error);
    }
    let refusal = |(_, reply): (usize, &Reply)| guard.attempt.refusal_in(reply, guard.context());
    if is_decided_by(refused)
        && let Some(refusal) = replies_of(&votes.received, refused).find_map(refusal)
    {
        if !by.is_empty() {
            guard.abandon();
        }
        return AcquireOutcome::Refused(refusal);
    }
    if !deployment.is_majority(replied) {
        if !by.is_empty() {
            guard.attempt.in_flight.mark_unknown();
        }
        return failed(guard, votes.failure());
    }
    // When a majority of the nodes may be free.
    let mut busy = tally.busy;
    busy.sort_by_key(|busy| busy.free_in);
    let free_in = busy.get(majority - 1).or(busy.last()).map(|busy| busy.free_in);
    match (free_in, busy.first()) {
        (Some(free_in), Some(Busy { sample, generation, .. })) if by.is_empty() => {
            if guard.entry.is_some() && votes.deployment.decides_alone() {
                guard.attempt.note_queued(sample.server);
            }
            let clock = GrantClock { sample: *sample, generation: *generation, subscription };
            AcquireOutcome::Busy { free_in, clock: votes.deployment.has_one_clock.then_some(clock) }
        }
        _ => AcquireOutcome::NoMajority { by, taken_for: free_in.filter(|_| busy.len() >= majority) },
    }
}
