//! What a new connection to a server makes doubtful. The server may have restarted without its
//! data, or be another one, so every lease is asked about: renewals alone would find out after a
//! third of the TTL. It may also have granted the lock of a lease again since: after a failover to
//! a replica that lagged behind, a renewal may find a later grant of the same attempt.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::keeper::Keeper;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use crate::clock::Moment;
use crate::traces::Report;
use crate::wire::{Failure, Vote, WaitFor};

/// The pause between two checks of a node, while there are leases. A connection that was closed is
/// replaced, and its leases are asked about, within this and two round trips.
const CHECK_PAUSE: Duration = Duration::from_millis(500);

impl Keeper {
    /// Looks after the connections of one node, until it is aborted. The client library does not
    /// tell that a connection was closed: the next request on it finds out.
    pub(super) async fn watch_connections(self: Arc<Keeper>, place: usize) {
        loop {
            sleep(CHECK_PAUSE).await;
            if !self.schedule().leases.is_empty() {
                self.nodes.node(place).check().await;
            }
            self.notice_connection(place);
            // Here alone, and so twice a second at most: with a server that closes each connection
            // after a while, one round would cause the next.
            if self.schedule().ask_once_new() {
                self.notify.notify_one();
            }
        }
    }

    /// Notices if the connection is another one than the last time.
    pub(super) fn notice_connection(&self, place: usize) {
        let connection = self.nodes.node(place).connection_state();
        self.schedule().notice_connection(place, connection);
    }

    /// Whether the server may have lost the hold, and granted the lock to the same attempt again:
    /// one that was set back to an earlier state has the attempt in its queue, and the renewal
    /// finds what it was granted from there.
    pub(super) fn may_be_another_grant(&self, lease: &Lease) -> bool {
        let attempt = lease.attempt();
        let may_return = attempt.queued_at.get().is_some() || attempt.in_flight.is_indeterminate();
        let is_comparable = may_return
            && self.nodes.deployment.decides_alone()
            && attempt.kind.capacity.is_none() // else others are granted it beside this one
            && lease.fencing_token().is_some();
        if is_comparable {
            self.notice_connection(0);
        }
        is_comparable && self.schedule().has_asked_since(attempt.confirmed())
    }

    /// Loses a lease that its task is to end, if the server has granted the lock again. Fails if it
    /// does not say whether it has.
    pub(super) async fn confirm(&self, lease: &Lease) -> Result<(), Failure> {
        let mut failure = None;
        // The first question may itself be what finds the connection closed.
        for _ in 0..3 {
            if lease.is_lost() || !self.may_be_another_grant(lease) {
                return Ok(());
            }
            let (sent, mut reports) = (Moment::now(), Vec::new());
            let (call, in_flight) = (lease.attempt().inspect(), Arc::default());
            let asking = self.nodes.ask(&call, self.nodes.all_nodes(), &in_flight, WaitFor::All);
            let votes = Box::pin(asking).await; // rarely: each release would carry its state
            self.compare_token(lease, sent, &votes.received, &mut reports);
            reports.into_iter().for_each(|report| report());
            let is_answered = last_token(&votes.received).is_some();
            failure = Some(if is_answered { Failure::replaced() } else { votes.failure() });
        }
        let is_known = lease.is_lost() || !self.may_be_another_grant(lease);
        failure.filter(|_| !is_known).map_or(Ok(()), Err)
    }

    /// Loses each lease of a lock that was granted since: the counter is above all tokens that the
    /// lease has reserved. If no answer comes, the connection is replaced, and all leases are asked
    /// about once more.
    ///
    /// A failover to a replica that lags behind loses the grant to A, not its place in the queue. B
    /// is granted the lock and releases it, which grants it to A again. A would never learn of B.
    pub(super) async fn compare_tokens(
        &self,
        leases: Vec<Lease>,
        limit: Duration,
        reports: &mut Vec<Report>,
    ) {
        if leases.is_empty() {
            return;
        }
        let all_nodes = self.nodes.all_nodes();
        let calls = leases.iter().map(|lease| (lease.attempt().inspect(), all_nodes)).collect();
        let sent = Moment::now();
        let answers = self.nodes.ask_ahead(calls, limit).await;
        for (lease, votes) in leases.iter().zip(answers) {
            self.compare_token(lease, sent, &votes, reports);
        }
    }

    fn compare_token(&self, lease: &Lease, sent: Moment, votes: &[Vote], reports: &mut Vec<Report>) {
        let own = lease.attempt().last_own_token(lease.fencing_token());
        let schedule = self.schedule();
        match last_token(votes) {
            _ if schedule.leases.get(lease).is_none() => {} // it was released meanwhile
            Some(last) if own.is_some_and(|own| last > own) => {
                lease.end_as(LeaseEnd::Revoked);
                self.lose(schedule, lease, LeaseEnd::Lost, reports); // the later grant is released
            }
            Some(_) => lease.attempt().note_confirmed(sent),
            None => {}
        }
    }
}

/// The last token, as the server reports it.
pub(super) fn last_token(votes: &[Vote]) -> Option<u64> {
    votes.iter().find_map(|(_, outcome)| outcome.as_ref().ok()?.texts().ok()?.get(1)?.parse().ok())
}
