//! The keeper: the one task of a client that renews its leases and gives back what was dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::attempt::{Leaving, QueueEntry};
use super::book::{Abandoned, Book, May, Round};
use super::{Attempt, LONGEST_SLEEP, Lease};
use crate::clock::Moment;
#[cfg(feature = "tracing")]
use crate::error::Error;
use crate::event::event;
use crate::options::Renewal;
use crate::wire::{Answer, Call, NodeSet, Nodes, Reply, Vote};

/// How many pipelines are under way at a time.
const ROUNDS: usize = 16;
/// How long a dropped attempt is pursued beyond its ttl once its client is gone.
const PURSUIT: Duration = Duration::from_secs(10);
/// How long after it was granted a lease is renewed first that not all nodes have granted.
const PATCH: Duration = Duration::from_millis(100);
/// The pause before a request without an answer is sent again: the least, and the most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Renews what is held, soonest first, and releases what was dropped.
///
/// A lease is in the book, or in one round, or over; all three change under the book's lock, so a lease
/// that was given back is never renewed afterwards.
pub(super) struct Keeper {
    nodes: Arc<Nodes>,
    book: Mutex<Book>,
    bell: Notify,
    /// Rung when everything that was dropped has been given back.
    settled: Notify,
    /// Its task has ended, with its runtime: nothing is renewed any more, nor given back. Written under the book's lock.
    ended: AtomicBool,
}

/// Which nodes have a lease: so many have it, and these have it not.
struct Tally {
    held: usize,
    without: NodeSet,
}

/// What the nodes say of a lease.
#[derive(PartialEq)]
enum Standing {
    /// More than half have it.
    Held,
    /// So many have it not that more than half cannot.
    Lost,
    Unknown,
}

impl Keeper {
    /// Starts the task on the current runtime. It ends once the keeper is closed and has nothing to do.
    pub(super) fn start(nodes: Arc<Nodes>) -> Arc<Keeper> {
        let keeper = Arc::new(Keeper {
            nodes,
            book: Mutex::default(),
            bell: Notify::new(),
            settled: Notify::new(),
            ended: AtomicBool::new(false),
        });
        tokio::spawn(Arc::clone(&keeper).run());
        keeper
    }

    /// No more leases will come; what was dropped is still given back.
    pub(super) fn close(&self) {
        self.book().closed = true;
        self.bell.notify_one();
    }

    /// Renews a lease from now on, if its options say so; soon, if not all nodes have granted it: they may by now.
    pub(super) fn schedule(&self, lease: &Lease, unanimous: bool) {
        let third = lease.until().since(lease.0.at) / 3;
        let due = match lease.options().renewal {
            Renewal::Automatic => lease.0.at + if unanimous { third } else { third.min(PATCH) },
            // Not renewed, but asked about if another hold of its owner turns out to be lost.
            Renewal::Never if lease.0.attempt.kind.reenters => lease.until(),
            Renewal::Never => return,
        };
        self.book().insert(lease, due, &self.bell);
    }

    /// Never renews the lease again, and ends the trust in it.
    pub(super) fn forget(&self, lease: &Lease) {
        self.book().strike(lease);
        lease.end();
    }

    /// Gives back what a dropped attempt has or gets on some nodes.
    pub(super) fn abandon(
        &self,
        attempt: Arc<Attempt>,
        for_good: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
    ) {
        let now = Moment::now();
        let give_up = now + attempt.options.ttl + PURSUIT;
        // What so few keep is in nobody's way.
        let counts = nodes.len() > self.nodes.spare();
        let mut book = self.book();
        if self.has_ended() {
            return; // its ttl ends it
        }
        book.returning += usize::from(counts);
        book.pursue(Abandoned { attempt, for_good, entry, give_up, nodes, counts }, now);
        drop(book);
        self.bell.notify_one();
    }

    /// Waits until everything that was dropped has been given back, or given up.
    pub(super) async fn settled(&self) {
        loop {
            let told = self.settled.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.book().returning == 0 {
                return;
            }
            told.await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    async fn run(self: Arc<Keeper>) {
        let _ending = Ending(Arc::clone(&self));
        let mut rounds = JoinSet::new();
        // Rounds that give back may wait for a node that hangs: never so many that renewals wait for them, nor one more of
        // those that only see to what a minority has left.
        let (mut returning, mut tidying) = (0, 0);
        loop {
            let next = loop {
                if rounds.len() == ROUNDS {
                    break LONGEST_SLEEP;
                }
                // Not in the match: its lock would be held in the arms.
                let (taken, closed) =
                    self.take(May { give_back: returning < ROUNDS / 2, tidy: tidying == 0 });
                match taken {
                    Ok(round) => {
                        let tidies = usize::from(round.tidies);
                        let returns = usize::from(!round.tidies && !round.releases.is_empty());
                        (returning, tidying) = (returning + returns, tidying + tidies);
                        let executed = Arc::clone(&self).execute(round);
                        rounds.spawn(async move {
                            executed.await;
                            (returns, tidies)
                        })
                    }
                    Err(Some(next)) => break next.since(Moment::now()).min(LONGEST_SLEEP),
                    Err(None) if rounds.is_empty() && closed => return,
                    Err(None) => break LONGEST_SLEEP,
                };
            };
            tokio::select! {
                () = self.bell.notified() => {}
                Some(done) = rounds.join_next() => {
                    let (returned, tidied) = done.unwrap_or_default();
                    (returning, tidying) = (returning - returned, tidying - tidied);
                }
                () = sleep(next) => {}
            }
        }
    }

    fn take(&self, may: May) -> (Result<Round, Option<Moment>>, bool) {
        let now = Moment::now();
        let mut book = self.book();
        let taken = book.take(now, may);
        book.sleeps_until = match taken {
            Ok(_) => None,
            Err(next) => Some(next.map_or(now + LONGEST_SLEEP, |next| next.min(now + LONGEST_SLEEP))),
        };
        (taken, book.closed)
    }

    async fn execute(self: Arc<Keeper>, round: Round) {
        let everyone = self.nodes.everyone();
        let renewals = round.renewals.iter().map(|(lease, ttl)| (lease.0.attempt.renew(*ttl), everyone));
        let releases =
            round.releases.iter().map(|it| (it.attempt.release(it.for_good, it.entry.as_ref()), it.nodes));
        let calls: Vec<(Call<'_>, NodeSet)> = renewals.chain(releases).collect();
        // A silent connection must leave time for another one before the shortest lease is over.
        let shortest = round.renewals.iter().map(|(lease, _)| lease.options().ttl).min();
        let limit = shortest.map_or(self.nodes.limit(), |ttl| ttl / 4);
        let sent = Moment::now();
        let mut answers = self.nodes.call_all(calls, limit).await.into_iter();
        let renewed: Vec<_> = answers.by_ref().take(round.renewals.len()).collect();
        let released: Vec<_> = answers.collect();
        let (mut gone, mut torn) = (Vec::new(), Vec::new());
        for ((lease, ttl), votes) in round.renewals.into_iter().zip(renewed) {
            let tally = self.count(&votes);
            let is_torn = self.standing(&tally) == Standing::Held && !tally.without.is_empty();
            if self.conclude_renewal(&lease, ttl, sent, &tally, &votes) {
                gone.push(lease);
            } else if let Some(ttl) = ttl.filter(|_| is_torn) {
                torn.push((lease, ttl, tally.without));
            }
        }
        for (it, votes) in round.releases.into_iter().zip(released) {
            self.conclude_release(it, &votes);
        }
        self.book().hurry(&gone);
        self.bell.notify_one();
        self.mend(torn, limit).await;
    }

    fn count(&self, votes: &[Vote]) -> Tally {
        let mut held = 0;
        let mut without = NodeSet::of([]);
        for (node, outcome) in votes {
            match outcome.as_ref().map(Reply::answer) {
                Ok(Ok(Answer::Final(time @ 1..))) => {
                    self.nodes.node(*node).observe(time.unsigned_abs());
                    held += 1;
                }
                Ok(Ok(Answer::Final(0 | -2))) => without = without.with(*node),
                _ => {}
            }
        }
        Tally { held, without }
    }

    fn standing(&self, tally: &Tally) -> Standing {
        if tally.held >= self.nodes.majority() {
            Standing::Held
        } else if tally.without.len() > self.nodes.spare() {
            Standing::Lost
        } else {
            Standing::Unknown
        }
    }

    /// Takes a lock that a majority keeps for a lease once more where a node has lost it: a node that was away is
    /// back, and the next one may go.
    async fn mend(&self, torn: Vec<(Lease, Duration, NodeSet)>, limit: Duration) {
        let torn: Vec<_> = {
            let _book = self.book();
            let held = |lease: &Lease| !lease.0.entry.over.load(Ordering::Relaxed) && !lease.is_lost();
            torn.into_iter()
                .filter(|(lease, ..)| held(lease))
                // From here on, a release waits for it, or has it refused.
                .map(|(lease, ttl, nodes)| (Leaving::new(&lease.0.attempt), lease, ttl, nodes))
                .collect()
        };
        if torn.is_empty() {
            return;
        }
        let calls =
            torn.iter().map(|(_, lease, ttl, nodes)| (lease.0.attempt.mend(*ttl, lease.0.token), *nodes));
        let votes = self.nodes.call_all(calls.collect(), limit).await;
        for ((leaving, ..), votes) in torn.into_iter().zip(votes) {
            if votes.iter().all(|(_, outcome)| outcome.is_ok()) {
                leaving.arrives();
            }
        }
    }

    /// True if the nodes say that the lease is over.
    fn conclude_renewal(
        &self,
        lease: &Lease,
        ttl: Option<Duration>,
        sent: Moment,
        tally: &Tally,
        _votes: &[Vote],
    ) -> bool {
        let mut book = self.book();
        if lease.0.entry.over.load(Ordering::Relaxed) {
            return false; // given back meanwhile: whatever the answer, it is nobody's business any more
        }
        match self.standing(tally) {
            Standing::Held => {
                match ttl {
                    Some(ttl) if lease.extend(sent, ttl) => book.insert(lease, sent + ttl / 3, &self.bell),
                    None if !lease.is_lost() => book.insert(lease, lease.until(), &self.bell),
                    _ => self.lose_late(book, lease),
                }
                false
            }
            Standing::Lost => {
                event!(error, lock = %lease.name(), "lost a lease: the server has ended it");
                book.strike(lease);
                lease.end();
                if self.nodes.single().is_none() {
                    drop(book);
                    self.abandon_everywhere(lease); // a minority may keep it
                }
                true
            }
            // The deadline stays where it is, and is what ends the trying.
            Standing::Unknown if lease.is_lost() => {
                self.lose_late(book, lease);
                false
            }
            Standing::Unknown => {
                event!(
                    warn,
                    lock = %lease.name(),
                    held = tally.held,
                    lost = tally.without.len(),
                    unknown = self.nodes.count() - tally.held - tally.without.len(),
                    nodes = self.nodes.count(),
                    error = first_failure(_votes).map(::tracing::field::display),
                    "cannot renew a lease on enough nodes: trying again"
                );
                let pause = (lease.options().ttl / 30).clamp(PAUSES.0, PAUSES.1);
                book.insert(lease, Moment::now() + pause, &self.bell);
                false
            }
        }
    }

    /// Its deadline has passed here, but the server may still keep it: the answers may have been lost.
    fn lose_late(&self, mut book: MutexGuard<'_, Book>, lease: &Lease) {
        event!(error, lock = %lease.name(), "lost a lease: it was not renewed in time");
        book.strike(lease);
        drop(book);
        lease.end();
        self.abandon_everywhere(lease);
    }

    fn abandon_everywhere(&self, lease: &Lease) {
        self.abandon(Arc::clone(&lease.0.attempt), true, None, self.nodes.everyone());
    }

    fn conclude_release(&self, mut it: Abandoned, votes: &[Vote]) {
        let now = Moment::now();
        let mut book = self.book();
        let mut left = NodeSet::of([]);
        for (node, outcome) in votes {
            let Err(failure) = outcome.as_ref().map_err(Clone::clone).and_then(Reply::answer) else {
                continue;
            };
            // For as long as the server cannot be reached, it may still have the attempt in its queue. Once the
            // client is gone, nobody waits for that long, nor for a minority that does not come back.
            let for_long = !book.closed && it.nodes.len() > self.nodes.spare();
            if failure.is_passing() && (for_long || now < it.give_up) {
                it.for_good |= failure.is_unknown();
                left = left.with(*node);
            } else {
                event!(error, lock = %it.attempt.name, error = %Error::from(failure), "cannot give a lock back: its ttl will");
            }
        }
        let returned = it.counts && left.len() <= self.nodes.spare();
        it.counts &= !returned;
        if !left.is_empty() {
            it.nodes = left;
            book.pursue(it, now + PAUSES.1 / 2);
        }
        if returned {
            self.returned(book);
        }
    }

    fn returned(&self, mut book: MutexGuard<'_, Book>) {
        if self.has_ended() {
            return; // while the last round was under way on another thread
        }
        book.returning -= 1;
        if book.returning == 0 {
            self.settled.notify_waiters();
        }
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many leases and dropped attempts are in the book.
    pub(super) fn entries(&self) -> usize {
        let book = self.book();
        book.due.len() + book.abandoned.len() + book.leftovers.len()
    }
}

/// Nobody waits for what is not done any more.
struct Ending(Arc<Keeper>);

impl Drop for Ending {
    fn drop(&mut self) {
        let left = {
            let mut book = self.0.book();
            self.0.ended.store(true, Ordering::Relaxed);
            std::mem::take(&mut *book)
        };
        drop(left);
        self.0.settled.notify_waiters();
    }
}

/// Why a node did not answer.
#[cfg(feature = "tracing")]
fn first_failure(votes: &[Vote]) -> Option<Error> {
    let failures = votes.iter().filter_map(|(_, outcome)| outcome.as_ref().err());
    failures.cloned().map(Error::from).next()
}
