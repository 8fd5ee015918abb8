//! [`Armed`], an attempt that is answered for, and [`Held`], what it became.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::attempt::QueueEntry;
use super::{Attempt, Client, Kind, Lease, ScriptSet};
use crate::clock::Moment;
use crate::error::Error;
use crate::options::Options;
use crate::wire::{Answer, Call, Failure, NodeSet, Reply, Until, Votes};

/// How often a release is sent before the rest is left to the keeper, or an exchange before it fails.
const TRIES: u32 = 3;

/// Answers for an attempt from before its first request: whatever it gets is given back, by
/// [`Held::release`] or, when this is dropped, by the keeper.
pub(super) struct Armed {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    lease: Option<Lease>,
    /// How the attempt may be queued, if it may.
    entry: Option<QueueEntry>,
    /// It was queued, once.
    queued: bool,
    /// A request has left, and what came of it was not looked at.
    in_flight: bool,
    /// A request has left, ever.
    asked: bool,
    /// There is nothing to give back, or it is meant to stay.
    disarmed: AtomicBool,
}

impl Armed {
    pub(super) fn new(client: &Arc<Client>, attempt: Attempt) -> Armed {
        Armed {
            client: Arc::clone(client),
            attempt: Arc::new(attempt),
            lease: None,
            entry: None,
            queued: false,
            in_flight: false,
            asked: false,
            disarmed: AtomicBool::new(false),
        }
    }

    /// To be called before a request leaves: from then on it must be undone.
    pub(super) fn sends(&mut self, entry: Option<&QueueEntry>) {
        (self.in_flight, self.asked) = (true, true);
        self.queued |= entry.is_some();
        if self.entry.is_none() {
            self.entry = entry.cloned();
        }
    }

    /// To be called with what came of the request. What is `decided` is a lease, which all nodes are to give back.
    pub(super) fn learns(&mut self, votes: &Votes, decided: bool) {
        self.in_flight = false;
        // Else, whoever has not answered may yet grant it, and nobody would know.
        if !decided && votes.rest.is_some() {
            self.attempt.doubt.stays();
        }
    }

    /// The attempt was granted, by all nodes or by a majority: from now on its lease is renewed.
    pub(super) fn granted(mut self, lease: Lease, unanimous: bool) -> Held {
        // What was granted has left the queue; only a late delivery could put it back.
        if unanimous && !self.attempt.doubt.is_open() {
            self.entry = None;
        }
        self.client.keeper.schedule(&lease, unanimous);
        self.lease = Some(lease.clone());
        Held { armed: self, lease }
    }

    /// Notes when the attempt was queued first, on the only server's clock.
    pub(super) fn note_queued(&self, time: u64) {
        if self.entry.is_some() && self.client.nodes.single().is_some() {
            self.attempt.note_queued(time);
        }
    }

    /// Gives back what was granted in vain.
    pub(super) fn give_back(self) {
        self.attempt.doubt.stays();
    }

    /// Gives back what some nodes have granted, and goes on waiting on the others. False if that may happen later: then
    /// it might take away what this attempt is granted until then, and the attempt must not go on.
    ///
    /// # Cancel safety
    /// Dropped, they are still answered for.
    pub(super) async fn let_go(&mut self, by: NodeSet) -> bool {
        self.in_flight = true;
        let (call, doubt) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &doubt, Until::Answered).await;
        self.in_flight = false;
        !doubt.is_open()
    }

    /// Nothing is wanted any more: a server that hands the lock over to it all the same, as one does that was set back, gets
    /// it back at once.
    fn expect_strays(&self) {
        if self.queued {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            let for_good = self.client.nodes.resend();
            self.client.wakeups.expect_stray(attempt.id, move |node| {
                keeper.abandon(Arc::clone(&attempt), for_good, None, NodeSet::of([node]));
            });
        }
    }

    fn disarm(&self) {
        self.disarmed.store(true, Ordering::Relaxed);
    }

    fn is_disarmed(&self) -> bool {
        self.disarmed.load(Ordering::Relaxed)
    }

    /// Whether the server must forget the attempt and refuse what may yet arrive of it.
    fn ends_for_good(&self) -> bool {
        self.in_flight || self.attempt.doubt.is_open() || self.client.nodes.resend()
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        if let Some(lease) = &self.lease {
            self.client.keeper.forget(lease);
        }
        // Sent again unseen, it may yet be granted after "busy" was answered.
        let resent = self.asked && self.client.nodes.resend();
        let may_have = self.lease.is_some() || self.in_flight || resent || self.attempt.doubt.is_open();
        let nothing_to_undo = !may_have && self.entry.is_none();
        if !self.is_disarmed() {
            self.expect_strays();
        }
        if !self.is_disarmed() && !nothing_to_undo {
            let for_good = self.ends_for_good();
            let everyone = self.client.nodes.everyone();
            self.client.keeper.abandon(Arc::clone(&self.attempt), for_good, self.entry.take(), everyone);
        }
    }
}

/// A lease and the duty to give it back. Dropped, it is given back in the background.
pub(crate) struct Held {
    armed: Armed,
    lease: Lease,
}

impl Held {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(crate) fn options(&self) -> &Options {
        &self.armed.attempt.options
    }

    /// Gives the lease back and waits for the answer.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub(crate) async fn release(self) -> Result<(), Error> {
        if self.armed.is_disarmed() {
            return Err(Error::Lost { name: self.lease.name().clone() }); // leaked by another guard on it
        }
        let (client, attempt) = (Arc::clone(&self.armed.client), Arc::clone(&self.armed.attempt));
        if self.lease.is_lost() {
            // The server may keep it for a while yet: dropped here, it is given back in the background.
            return Err(Error::Lost { name: self.lease.name().clone() });
        }
        client.keeper.forget(&self.lease);
        let for_good = self.armed.ends_for_good();
        let call = attempt.release(for_good, self.armed.entry.as_ref());
        let (outcome, doubt) = insist(&client, &attempt, &call).await;
        let Settled { answer, reply, votes } = outcome?;
        let Answer::Final(answer) = answer else { return Err(reply.unexpected().into()) };
        self.armed.expect_strays();
        self.armed.disarm();
        see_to_the_rest(&client, &attempt, self.armed.entry.clone(), votes);
        match (answer, doubt) {
            (1.., _) => Ok(()),
            // Released by an earlier delivery, or lost before: never to be taken for a success.
            (0, Some(failure)) => Err(failure.into()),
            (0, None) => Err(Error::NotHeld { name: attempt.name.clone() }),
            _ => Err(attempt.refusal(answer).unwrap_or_else(|| reply.unexpected().into())),
        }
    }

    /// Makes the hold one of another kind, by a script that answers as a renewal does. The old lease is over
    /// before the request leaves; the token stays.
    ///
    /// # Cancel safety
    /// Dropped, the hold is given back in the background, of whichever kind it is by then.
    pub(crate) async fn exchange(
        mut self,
        scripts: &'static ScriptSet,
        kind: &'static Kind,
        options: Options,
    ) -> Result<Held, Error> {
        let (client, lease) = (Arc::clone(&self.armed.client), self.lease.clone());
        let lost = || Error::Lost { name: lease.name().clone() };
        if self.armed.is_disarmed() || lease.is_lost() {
            return Err(lost());
        }
        client.keeper.forget(&lease);
        let attempt = Arc::new(self.armed.attempt.exchanged(kind, Arc::new(options)));
        self.armed.attempt = Arc::clone(&attempt);
        let call = attempt.exchange(scripts);
        let late = attempt.doubt.is_open();
        let sent = Moment::now();
        let Settled { answer, reply, votes } = insist(&client, &attempt, &call).await.0?;
        match answer {
            Answer::Final(1..) => {
                let until = sent + attempt.trusted(attempt.options.ttl);
                if Moment::now() >= until {
                    return Err(lost());
                }
                let lease = Lease::new(Arc::clone(&attempt), lease.fencing_token(), sent, until);
                exchange_the_rest(&client, scripts, &attempt, lease.clone(), &votes, late);
                Ok(self.armed.granted(lease, client.nodes.single().is_some()))
            }
            Answer::Final(0) => Err(lost()),
            Answer::Final(answer) => {
                Err(attempt.refusal(answer).unwrap_or_else(|| reply.unexpected().into()))
            }
            Answer::Busy(..) | Answer::TooLow(_) => Err(reply.unexpected().into()),
        }
    }

    /// From now on this is never released: once it is dropped, it ends with its ttl.
    pub(crate) fn leak(&self) {
        self.armed.disarm();
        self.armed.client.keeper.forget(&self.lease);
    }
}

/// What a request came to that needs a majority.
pub(crate) struct Settled {
    pub(crate) answer: Answer,
    /// One of those who answered like this.
    pub(crate) reply: Reply,
    votes: Votes,
}

/// Sends a request to all nodes, and finds out what more than half of them say, "yes" being a positive number.
pub(crate) async fn settle(client: &Client, attempt: &Attempt, call: &Call<'_>) -> Result<Settled, Failure> {
    let nodes = &client.nodes;
    let mut votes = nodes.ask(call, nodes.everyone(), &attempt.doubt, Until::Decided(1)).await;
    votes.doubt_noes();
    let (mut yes, mut no) = (Vec::new(), Vec::new());
    for (index, (_, outcome)) in votes.cast.iter().enumerate() {
        match outcome.as_ref().map(Reply::answer) {
            Ok(Ok(answer @ Answer::Final(1..))) => yes.push((index, answer)),
            Ok(Ok(answer)) => no.push((index, answer)),
            Ok(Err(failure)) if votes.of() == 1 => return Err(failure),
            _ => {}
        }
    }
    let some_did = !yes.is_empty();
    let decided = if yes.len() >= votes.majority() {
        yes.into_iter().max_by_key(|(_, answer)| if let Answer::Final(number) = answer { *number } else { 0 })
    } else if no.len() > votes.of() - votes.majority() {
        no.into_iter().next() // whatever the others would say
    } else {
        None
    };
    match decided {
        Some((index, answer)) => match votes.cast[index].1.clone() {
            Ok(reply) => Ok(Settled { answer, reply, votes }),
            Err(failure) => Err(failure),
        },
        // Where it was done, a second delivery may find nothing to do.
        None if some_did => Err(votes.failure().with_effect()),
        None => Err(votes.failure()),
    }
}

/// Sends a request again where that may help. Beside the answer, the failure of an earlier delivery that may
/// have run.
async fn insist(
    client: &Client,
    attempt: &Attempt,
    call: &Call<'_>,
) -> (Result<Settled, Failure>, Option<Failure>) {
    let mut doubt = None;
    let mut tries_left = TRIES;
    loop {
        tries_left -= 1;
        match settle(client, attempt, call).await {
            Err(failure) if failure.is_passing() && tries_left > 0 => {
                doubt = doubt.or(failure.is_unknown().then_some(failure));
            }
            outcome => {
                let resent = outcome.as_ref().ok().and_then(|settled| settled.reply.resent.clone());
                return (outcome, doubt.or(resent));
            }
        }
    }
}

/// Repeats an exchange on a minority of the nodes that have not answered, until they do: they would keep the hold as
/// what it was, and renewals would prolong it. If what it was may arrive there `late`, until they have it.
fn exchange_the_rest(
    client: &Arc<Client>,
    scripts: &'static ScriptSet,
    attempt: &Arc<Attempt>,
    lease: Lease,
    votes: &Votes,
    late: bool,
) {
    let not_yet = move |votes: &Votes| if late { votes.noes() } else { NodeSet::of([]) };
    let mut left = votes.missing().union(not_yet(votes));
    if left.is_empty() {
        return;
    }
    let (client, attempt) = (Arc::clone(client), Arc::clone(attempt));
    let nodes = Arc::clone(&client.nodes);
    nodes.spawn(async move {
        while !left.is_empty() && !lease.is_lost() {
            let call = attempt.exchange(scripts);
            let votes = client.nodes.ask(&call, left, &attempt.doubt, Until::Answered).await;
            left = votes.failed().union(not_yet(&votes));
            tokio::time::sleep(client.nodes.limit()).await;
        }
    });
}

/// Has the keeper release what a minority of the nodes may still keep, which a majority has released.
fn see_to_the_rest(client: &Arc<Client>, attempt: &Arc<Attempt>, entry: Option<QueueEntry>, votes: Votes) {
    let give_back = |client: &Client, attempt: &Arc<Attempt>, entry: &Option<QueueEntry>, nodes: NodeSet| {
        client.keeper.abandon(Arc::clone(attempt), true, entry.clone(), nodes);
    };
    let failed = votes.failed();
    if !failed.is_empty() {
        give_back(client, attempt, &entry, failed);
    }
    if let Some(mut rest) = votes.rest {
        let (client, attempt) = (Arc::clone(client), Arc::clone(attempt));
        client.clone().nodes.spawn(async move {
            while let Some((node, outcome)) = rest.next().await {
                if outcome.is_err() {
                    give_back(&client, &attempt, &entry, NodeSet::of([node]));
                }
            }
        });
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}
