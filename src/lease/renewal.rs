//! One batch of the keeper: the renewals and releases that are sent together, and what the nodes'
//! replies to them mean.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::keeper::{Keeper, log_given_up, say};
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::schedule::{Abandoned, Batch, PendingRelease, RENEWALS_PER_TTL, Schedule, patience};
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::measure;
use crate::options::Renewal;
use crate::traces::{Report, Span, event, released_in_background, renewed};
use crate::wire::answers::WRONG_TYPE;
use crate::wire::{Answer, Call, Nodes, Reply, Tally, Vote, replies_of};

/// The longest pause before a renewal without a reply is sent again; a thirtieth of the time for
/// which the lease is valid after a confirmation, if that is shorter.
const LONGEST_RENEWAL_PAUSE: Duration = Duration::from_secs(1);
/// The pause before a release without a reply is sent again.
const RELEASE_PAUSE: Duration = Duration::from_millis(500);

impl Keeper {
    /// Sends a batch, and concludes from the replies.
    pub(super) async fn execute(self: Arc<Keeper>, batch: Batch) {
        let all_nodes = self.nodes.all_nodes();
        let renewals = batch.renewals.iter().map(|(lease, ttl)| (lease.attempt().renew(*ttl), all_nodes));
        let releases = batch.releases.iter().map(|pending| {
            let Abandoned { attempt, is_final, entry, nodes, .. } = &pending.abandoned;
            (attempt.release(*is_final, entry.as_ref()), *nodes)
        });
        let calls: Vec<(Arc<Call>, NodeSet)> = renewals.chain(releases).collect();
        let limit = batch.renewals.iter().map(|(lease, _)| patience(lease)).min();
        let limit = limit.unwrap_or(self.nodes.limit());
        let sent = Moment::now();
        let mut sending = SentRenewal::all(&batch.renewals, sent).into_iter();
        let mut answers = self.nodes.ask_ahead(calls, limit).await.into_iter();
        let renewed: Vec<_> = answers.by_ref().take(batch.renewals.len()).collect();
        let released: Vec<_> = answers.collect();
        let without = self.without(&batch.renewals);
        let (mut gone, mut degraded, mut doubtful) = (Vec::new(), Vec::new(), Vec::new());
        let mut reports = Vec::new();
        for (((lease, ttl), votes), without) in batch.renewals.into_iter().zip(renewed).zip(without) {
            let tally = RenewalTally::count(&self.nodes, &votes, without);
            reports.extend(sending.next().map(|sent| sent.answered(tally.state)));
            let is_degraded = tally.state != LeaseState::Lost && !tally.without.is_empty();
            let is_held = tally.state == LeaseState::Held;
            let is_doubtful = is_held && self.may_be_another_grant(&lease);
            if is_held && !is_doubtful {
                lease.attempt().note_confirmed(sent);
            }
            if self.conclude_renewal(&lease, ttl, sent, &tally, votes, &mut reports) {
                gone.push(lease);
            } else if is_doubtful {
                doubtful.push(lease);
            } else if let Some(ttl) = ttl.filter(|_| is_degraded) {
                degraded.push((lease, ttl, tally.without));
            }
        }
        for (pending, votes) in batch.releases.into_iter().zip(released) {
            self.conclude_release(pending, &votes, &mut reports);
        }
        self.schedule().expedite_siblings(&gone);
        self.notify.notify_one();
        self.repair(degraded, limit).await;
        self.compare_tokens(doubtful, limit, &mut reports).await;
        say(reports);
    }

    /// The nodes that are known to be without each lease. Only the batch that renews it notes them.
    fn without(&self, renewals: &[(Lease, Option<Duration>)]) -> Vec<NodeSet> {
        let schedule = self.schedule();
        let without = |lease| schedule.leases.get(lease).map(|kept| kept.without).unwrap_or_default();
        renewals.iter().map(|(lease, _)| without(lease)).collect()
    }

    /// Acquires the lock of a valid lease again on nodes that have lost it. A node was away and is
    /// back with its data lost; if the next one fails, no majority would hold the lease.
    async fn repair(&self, mut degraded: Vec<(Lease, Duration, NodeSet)>, limit: Duration) {
        {
            let schedule = self.schedule();
            degraded.retain(|(lease, ..)| schedule.leases.get(lease).is_some() && !lease.is_lost());
            // From here on, a release waits for this request, or has it refused.
            degraded.iter().for_each(|(lease, ..)| lease.attempt().in_flight.sent());
        }
        if degraded.is_empty() {
            return;
        }
        let calls = degraded
            .iter()
            .map(|(lease, ttl, nodes)| (lease.attempt().repair(*ttl, lease.fencing_token()), *nodes));
        let votes = self.nodes.ask_ahead(calls.collect(), limit).await;
        for ((lease, ..), votes) in degraded.iter().zip(votes) {
            let in_flight = &lease.attempt().in_flight;
            if votes.iter().any(|(_, outcome)| Reply::unknown_effect(outcome).is_some()) {
                in_flight.mark_unknown();
            }
            in_flight.answered();
        }
    }

    /// True if the nodes say that the lease has ended.
    fn conclude_renewal(
        &self,
        lease: &Lease,
        ttl: Option<Duration>,
        sent: Moment,
        tally: &RenewalTally,
        votes: Vec<Vote>,
        reports: &mut Vec<Report>,
    ) -> bool {
        let mut schedule = self.schedule();
        let Some(kept) = schedule.leases.get_mut(lease) else { return false }; // released meanwhile
        match tally.state {
            LeaseState::Held => {
                kept.without = NodeSet::default();
                let is_only_asked = ttl.is_none() || lease.options().renewal == Renewal::Never;
                match ttl {
                    // It was asked about, and keeps its end.
                    _ if is_only_asked && !lease.is_lost() => {
                        schedule.insert(lease, lease.until(), sent, &self.notify);
                    }
                    Some(ttl) if lease.extend(sent, ttl) => {
                        schedule.insert(lease, sent + ttl / RENEWALS_PER_TTL, sent, &self.notify);
                        let until = lease.until(); // a task that is woken may end it
                        drop(schedule);
                        lease.wake_waiters();
                        let what = (lease.name(), lease.kind().name, || lease.owner());
                        reports.extend(renewed(&lease.attempt().origin.observer, what, until));
                    }
                    _ => self.lose(schedule, lease, LeaseEnd::Lost, reports),
                }
                false
            }
            LeaseState::Lost => {
                self.lose(schedule, lease, LeaseEnd::Revoked, reports);
                true
            }
            // The deadline stays, and ends the retries.
            LeaseState::Unknown if lease.is_lost() => {
                self.lose(schedule, lease, LeaseEnd::Lost, reports);
                false
            }
            LeaseState::Unknown => {
                kept.without = tally.without_since;
                // Several tries must fit in before the deadline of a short lease.
                let pause = (lease.span() / 30).min(LONGEST_RENEWAL_PAUSE);
                schedule.insert(lease, Moment::now() + pause, sent, &self.notify);
                let (_lease, _nodes) = (lease.clone(), self.nodes.deployment.nodes);
                let (_held, _lost) = (tally.with.len(), tally.without.len());
                reports.push(Box::new(move || {
                    let _votes = votes;
                    event!(
                        debug,
                        lock = %_lease.name(),
                        held = _held,
                        lost = _lost,
                        unknown = _nodes - _held - _lost,
                        nodes = _nodes,
                        error = first_failure(&_votes).map(::tracing::field::display),
                        "no majority renewed a lease: retrying"
                    );
                }));
                false
            }
        }
    }

    /// The nodes say that the lease has ended: it was revoked. Or the deadline has passed here, but
    /// they may still hold the lock, since the replies may have been lost.
    pub(super) fn lose(
        &self,
        mut schedule: MutexGuard<'_, Schedule>,
        lease: &Lease,
        how: LeaseEnd,
        reports: &mut Vec<Report>,
    ) {
        schedule.remove(lease, how);
        // One server that has revoked it has nothing left of it; of several, a minority may.
        if how == LeaseEnd::Lost || !self.nodes.deployment.decides_alone() {
            // Under the lock under which the lease was removed: a close must find one or the other.
            let (attempt, nodes) = (Arc::clone(lease.attempt()), self.nodes.all_nodes());
            let (has_lease, is_final, entry) = (true, true, None);
            self.abandon_in(&mut schedule, Abandoned { attempt, has_lease, is_final, entry, nodes });
        }
        drop(schedule);
        self.notify.notify_one();
        reports.extend(lease.announce());
    }

    fn conclude_release(&self, mut pending: PendingRelease, votes: &[Vote], reports: &mut Vec<Report>) {
        let now = Moment::now();
        let mut schedule = self.schedule();
        let (mut left, mut lasting) = (NodeSet::default(), Vec::new());
        for (node, outcome) in votes {
            // Any number means that nothing of the attempt is left to release, also -2: the key
            // holds something else.
            let Err(failure) = outcome.as_ref().map_err(Clone::clone).and_then(Reply::answer) else {
                continue;
            };
            // While the server cannot be reached, it may still have the attempt in its queue. After
            // the client is dropped, no release is retried for that long, nor one of a minority
            // that does not come back.
            let may_retry_long =
                !schedule.is_closed && self.nodes.deployment.is_blocked_by(pending.abandoned.nodes);
            let may_pass = failure.is_transient() || failure.is_unlisted() && pending.spend_retry();
            if may_pass && (may_retry_long || now < pending.give_up) {
                pending.abandoned.is_final |= failure.is_indeterminate();
                left = left.with(*node);
            } else {
                lasting.push((self.nodes.labels[*node].clone(), failure));
            }
        }
        pending.failures += lasting.len();
        let has_failed = pending.failures > self.nodes.deployment.max_failures();
        // Those on which it failed for good still hold it, too.
        let may_hold = left.len() + if left.is_empty() { 0 } else { pending.failures };
        let ended = pending.number.take_if(|_| may_hold <= self.nodes.deployment.max_failures());
        let attempt = Arc::clone(&pending.abandoned.attempt);
        // Without a lease, a grant was reported to no task: neither is its release.
        let is_reported = pending.abandoned.has_lease && !attempt.is_idle();
        let has_held = is_reported && !Tally::of(votes, 1, |_| true).positive.is_empty();
        let mut given_up = None;
        let is_released = left.is_empty() && lasting.is_empty();
        if !left.is_empty() {
            pending.abandoned.nodes = left;
            given_up = schedule.schedule_release(pending, now + RELEASE_PAUSE);
        }
        ended.into_iter().for_each(|number| schedule.end_release(number, has_failed));
        drop(schedule);
        if ended.is_some() || given_up.is_some() {
            self.settled.notify_waiters(); // not under the lock: it runs wakers
        }
        reports.push(Box::new(move || {
            log_given_up(given_up);
            if is_released {
                let what = (&attempt.name, attempt.kind.name, || attempt.owner());
                released_in_background(&attempt.origin.observer, what, has_held);
            }
            for (_server, _failure) in lasting {
                event!(
                    error, lock = %attempt.name, holder = attempt.holder(),
                    server = %_server, error = %_failure,
                    "release failed: the lock stays held until its TTL expires"
                );
            }
        }));
    }
}

/// A renewal that was sent: what spans and metrics say of it.
pub(super) struct SentRenewal {
    kind: &'static str,
    span: Span,
    /// How long after it was due.
    lag: Duration,
}

impl SentRenewal {
    /// None if neither feature is on.
    fn all(renewals: &[(Lease, Option<Duration>)], sent: Moment) -> Vec<SentRenewal> {
        let is_heard = measure::ON || cfg!(feature = "tracing");
        renewals.iter().filter(|_| is_heard).map(|(lease, ttl)| SentRenewal::new(lease, *ttl, sent)).collect()
    }

    pub(super) fn new(lease: &Lease, ttl: Option<Duration>, sent: Moment) -> SentRenewal {
        let (kind, ttl) = (lease.kind().name, ttl.unwrap_or(lease.options().ttl));
        // It is due once a third has passed of what the latest renewal gave it, or the grant: a
        // claim, or what a task of this client left of its own.
        let granted = lease.until().since(lease.counts_from());
        let span = granted.min(lease.attempt().trusted_span(ttl));
        let lag = (span - span / RENEWALS_PER_TTL).saturating_sub(lease.until().since(sent));
        SentRenewal { kind, span: Span::of_renewal(lease.name(), kind), lag }
    }

    pub(super) fn answered(self, state: LeaseState) -> Report {
        let outcome = match state {
            LeaseState::Held => "renewed",
            LeaseState::Lost => "lost",
            LeaseState::Unknown => "unknown",
        };
        Box::new(move || {
            self.span.record("outcome", outcome);
            measure::renewed(self.kind, outcome, self.lag);
        })
    }
}

/// Which nodes have the lease, and which have it not.
pub(super) struct RenewalTally {
    pub(super) state: LeaseState,
    with: NodeSet,
    without: NodeSet,
    /// Also those that answered so in earlier batches, since a majority last confirmed the lease.
    /// They may have it again.
    ///
    /// Of three nodes, A has lost the lease, B and C are silent, and A is repaired. Then B returns
    /// without the lease. If B were repaired as well, a majority would have again what a majority
    /// has lost.
    without_since: NodeSet,
}

/// What the nodes say about the lease.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum LeaseState {
    /// A majority has it.
    Held,
    /// More than `max_failures` nodes have answered that they do not have it, since a majority last
    /// confirmed it.
    Lost,
    Unknown,
}

impl RenewalTally {
    pub(super) fn count(nodes: &Nodes, votes: &[Vote], without_before: NodeSet) -> RenewalTally {
        let tally = Tally::of(votes, 1, |answer| answer == WRONG_TYPE);
        for (node, reply) in replies_of(votes, tally.positive) {
            if let Some(Answer::Final(time)) = reply.expected() {
                nodes.node(node).observe(time.unsigned_abs());
            }
        }
        let without = tally.negative.union(tally.refused);
        let without_since = without_before.union(without);
        let state = if nodes.deployment.is_blocked_by(without_since) {
            LeaseState::Lost
        } else if nodes.deployment.is_majority(tally.positive) {
            LeaseState::Held
        } else {
            LeaseState::Unknown
        };
        RenewalTally { state, with: tally.positive, without, without_since }
    }
}

/// The failure of a node that did not answer.
fn first_failure(votes: &[Vote]) -> Option<&crate::wire::Failure> {
    votes.iter().find_map(|(_, outcome)| outcome.as_ref().err())
}
