//! [`Lease::renew`]: a renewal that the application asks for.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use super::client::Client;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::renewal::{LeaseState, RenewalTally, SentRenewal};
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::{Error, Operation};
use crate::traces::{Report, renewed};
use crate::wire::WaitFor;

impl Lease {
    /// Extends the lease to one TTL from now, and returns until when it is
    /// [valid](Lease::valid_until) then.
    ///
    /// With [`Renewal::Never`](crate::Renewal::Never) the application renews where it has made
    /// progress: a task that hangs loses its lock.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// use std::time::Duration;
    /// use redlatch::{Options, Renewal};
    ///
    /// let by_hand = Options::new().renewal(Renewal::Never).ttl(Duration::from_secs(60));
    /// let import = locks.with_options(by_hand)?.mutex("import")?;
    /// import.run(async |lease| {
    ///     for file in ["a.csv", "b.csv"] {
    ///         lease.renew().await?; // a minute for each file
    ///         println!("{file}");
    ///     }
    ///     Ok::<_, redlatch::Error>(())
    /// }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// **What it promises**: the returned time counts from before the request was sent, as that of
    /// a grant does. A lease whose deadline has passed is never revived, whatever the server
    /// answers, and none outlasts its [longest hold](crate::Options::max_hold). Automatic renewals
    /// continue beside it.
    ///
    /// **What it does not**: retry. If one request fails, the deadline stays, and the call may be
    /// repeated until then.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was [lost](LeaseEnd::Lost), or the server answered that it has
    ///   no such hold: it is [revoked](LeaseEnd::Revoked) from then on.
    /// - [`Error::Released`]: its guard was released or leaked.
    /// - [`Error::Closed`]: the client was [closed](crate::Locks::close).
    /// - [`Error::Redis`]: the server failed. The lease may have been
    ///   [extended](Error::is_indeterminate) there.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop the lease has its old deadline, and the server may hold the lock
    /// for longer. Its guard releases it all the same.
    pub async fn renew(&self) -> Result<Instant, Error> {
        let ended = || self.ended(Operation::Renew);
        if let Some(error) = ended() {
            return Err(error);
        }
        // Only a guard keeps a lease valid, and a guard keeps its client.
        let Some(client) = self.client() else {
            return Err(self.error(Operation::Renew, LeaseEnd::Released));
        };
        // That of the hold, of which this may be a member's.
        let lease = self.0.of_hold.as_ref().unwrap_or(self);
        let renewal = pin!(renew(&client, lease));
        client.run(renewal, || client.context(Operation::Renew, self.name())).await?;
        // The member may have left the hold meanwhile.
        ended().map_or_else(|| Ok(self.valid_until()), Err)
    }

    fn client(&self) -> Option<Arc<Client>> {
        self.attempt().origin.client.upgrade()?.downcast().ok()
    }
}

/// Sends one renewal to all nodes, beside those of the keeper, and concludes as the keeper does.
async fn renew(client: &Client, lease: &Lease) -> Result<(), Error> {
    let (nodes, keeper) = (&client.nodes, &client.keeper);
    let sent = Moment::now();
    let Some(ttl) = lease.renewable_ttl(sent) else { return Ok(()) }; // its longest hold is over
    let call = lease.attempt().renew(Some(ttl));
    let sending = SentRenewal::new(lease, Some(ttl), sent);
    {
        let _schedule = keeper.schedule();
        if let Some(end) = lease.end() {
            return Err(lease.error(Operation::Renew, end));
        }
        lease.note_renewing();
    }
    // Not counted as in flight: one that arrives after the release finds nothing to extend.
    let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::Majority(1)).await;
    // Which nodes are without it is what the keeper's batches note.
    let state = RenewalTally::count(nodes, &votes.received, NodeSet::default()).state;
    let mut reports: Vec<Report> = vec![sending.answered(state)];
    let schedule = keeper.schedule();
    match state {
        // It was released, or passed to another task.
        _ if schedule.leases.get(lease).is_none() => drop(schedule),
        LeaseState::Held if lease.extend(sent, ttl) => {
            let until = lease.until(); // a task that is woken may end it
            drop(schedule);
            lease.wake_waiters();
            let what = (lease.name(), lease.kind().name, || lease.owner());
            reports.extend(renewed(&lease.attempt().origin.observer, what, until));
        }
        LeaseState::Held => keeper.lose(schedule, lease, LeaseEnd::Lost, &mut reports),
        LeaseState::Lost => {
            keeper.lose(schedule, lease, LeaseEnd::Revoked, &mut reports);
            keeper.schedule().expedite_siblings(std::slice::from_ref(lease));
            keeper.notify.notify_one();
        }
        LeaseState::Unknown => drop(schedule),
    }
    reports.into_iter().for_each(|report| report());
    let context = || client.context(Operation::Renew, lease.name());
    match (lease.end(), state) {
        (Some(end), _) => Err(lease.error(Operation::Renew, end)),
        (None, LeaseState::Unknown) => Err(client.error(votes.failure(), context())),
        (None, _) => Ok(()),
    }
}
