//! The keeper: the one task of a client that renews its leases and gives back what was dropped.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Attempt, LONGEST_SLEEP, Lease};
use crate::clock::Moment;
use crate::event::event;
use crate::options::Renewal;
use crate::wire::{Answer, Call, Failure, Node, Reply};

/// How many requests travel in one pipeline.
const ROUND: usize = 128;
/// How many pipelines are under way at a time.
const ROUNDS: usize = 16;
/// How many dropped attempts are remembered. Beyond it one is left to its ttl: with a server that is
/// down for long, memory must not grow with every caller that gives up.
const ABANDONED: usize = 65_536;
/// How long a dropped attempt is pursued beyond its ttl once its client is gone.
const PURSUIT: Duration = Duration::from_secs(10);
/// The pause before a request without an answer is sent again: the least, and the most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Renews what is held, soonest first, and releases what was dropped, for one node.
///
/// A lease is in the book, or in one round, or over; all three change under the book's lock, so a lease
/// that was given back is never renewed afterwards.
pub(super) struct Keeper {
    node: Arc<Node>,
    book: Mutex<Book>,
    bell: Notify,
    /// Rung when everything that was dropped has been given back.
    settled: Notify,
}

#[derive(Default)]
struct Book {
    due: BTreeMap<(Moment, u64), Lease>,
    abandoned: BTreeMap<(Moment, u64), Abandoned>,
    /// How many dropped attempts have not been given back yet, in the book or in a round.
    returning: usize,
    entries: u64,
    /// Until when the task sleeps, unless it is woken. What is due later need not wake it, which is what
    /// keeps a lock that is soon released from costing a switch of tasks.
    sleeps_until: Option<Moment>,
    closed: bool,
}

/// Where a lease stands in the book. Read and written only under the book's lock.
#[derive(Default)]
pub(super) struct Entry {
    number: AtomicU64,
    due: AtomicU64,
    over: AtomicBool,
}

struct Abandoned {
    attempt: Arc<Attempt>,
    for_good: bool,
    waiter: String,
    give_up: Moment,
}

/// What one pipeline does.
#[derive(Default)]
struct Round {
    /// With what to extend them; those that are not extended are only asked about.
    renewals: Vec<(Lease, Option<Duration>)>,
    releases: Vec<Abandoned>,
}

impl Keeper {
    /// Starts the task on the current runtime. It ends once the keeper is closed and has nothing to do.
    pub(super) fn start(node: Arc<Node>) -> Arc<Keeper> {
        let keeper =
            Arc::new(Keeper { node, book: Mutex::default(), bell: Notify::new(), settled: Notify::new() });
        tokio::spawn(Arc::clone(&keeper).run());
        keeper
    }

    /// No more leases will come; what was dropped is still given back.
    pub(super) fn close(&self) {
        self.book().closed = true;
        self.bell.notify_one();
    }

    /// Renews a lease from now on, if its options say so.
    pub(super) fn schedule(&self, lease: &Lease) {
        let due = match lease.options().renewal {
            Renewal::Automatic => lease.0.at + lease.until().since(lease.0.at) / 3,
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

    /// Gives back what a dropped attempt has or gets.
    pub(super) fn abandon(&self, attempt: Arc<Attempt>, for_good: bool, waiter: String) {
        let now = Moment::now();
        let give_up = now + attempt.options.ttl + PURSUIT;
        let mut book = self.book();
        book.returning += 1;
        book.pursue(Abandoned { attempt, for_good, waiter, give_up }, now);
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

    async fn run(self: Arc<Keeper>) {
        let mut rounds = JoinSet::new();
        loop {
            let next = loop {
                if rounds.len() == ROUNDS {
                    break LONGEST_SLEEP;
                }
                // Not in the match: its lock would be held in the arms.
                let (taken, closed) = self.take();
                match taken {
                    Ok(round) => rounds.spawn(Arc::clone(&self).execute(round)),
                    Err(Some(next)) => break next.since(Moment::now()).min(LONGEST_SLEEP),
                    Err(None) if rounds.is_empty() && closed => return,
                    Err(None) => break LONGEST_SLEEP,
                };
            };
            tokio::select! {
                () = self.bell.notified() => {}
                Some(_) = rounds.join_next() => {}
                () = sleep(next) => {}
            }
        }
    }

    fn take(&self) -> (Result<Round, Option<Moment>>, bool) {
        let now = Moment::now();
        let mut book = self.book();
        let taken = book.take(now);
        book.sleeps_until = match taken {
            Ok(_) => None,
            Err(next) => Some(next.map_or(now + LONGEST_SLEEP, |next| next.min(now + LONGEST_SLEEP))),
        };
        (taken, book.closed)
    }

    async fn execute(self: Arc<Keeper>, round: Round) {
        let renewals = round.renewals.iter().map(|(lease, ttl)| lease.0.attempt.renew(*ttl));
        let releases = round.releases.iter().map(|it| it.attempt.release(it.for_good, &it.waiter));
        let calls: Vec<Call<'_>> = renewals.chain(releases).collect();
        // A silent connection must leave time for another one before the shortest lease is over.
        let shortest = round.renewals.iter().map(|(lease, _)| lease.options().ttl).min();
        let limit = shortest.map_or(self.node.limit(), |ttl| ttl / 4);
        let sent = Moment::now();
        let mut answers = self.node.call_all(&calls, limit).await.into_iter();
        let renewed = answers.by_ref().take(round.renewals.len()).collect::<Vec<_>>();
        let released: Vec<_> = answers.collect();
        let gone = round.renewals.into_iter().zip(renewed).filter_map(|((lease, ttl), answer)| {
            let gone = self.conclude_renewal(&lease, ttl, sent, &answer);
            gone.then_some(lease)
        });
        let gone: Vec<Lease> = gone.collect();
        for (it, answer) in round.releases.into_iter().zip(released) {
            self.conclude_release(it, &answer.and_then(|reply| reply.answer()));
        }
        self.book().hurry(&gone);
        self.bell.notify_one();
    }

    /// True if the server says that the lease is over.
    fn conclude_renewal(
        &self,
        lease: &Lease,
        ttl: Option<Duration>,
        sent: Moment,
        answer: &Result<Reply, Failure>,
    ) -> bool {
        let mut book = self.book();
        if lease.0.entry.over.load(Ordering::Relaxed) {
            return false; // given back meanwhile: whatever the answer, it is nobody's business any more
        }
        match answer.as_ref().map(Reply::answer) {
            Ok(Ok(Answer::Final(time @ 1..))) => {
                self.node.observe(time.unsigned_abs());
                match ttl {
                    Some(ttl) if lease.extend(sent, ttl) => book.insert(lease, sent + ttl / 3, &self.bell),
                    None if !lease.is_lost() => book.insert(lease, lease.until(), &self.bell),
                    _ => self.lose_late(book, lease),
                }
                false
            }
            Ok(Ok(Answer::Final(0 | -2))) => {
                event!(error, lock = %lease.name(), "lost a lease: the server has ended it");
                book.strike(lease);
                lease.end();
                true
            }
            // Unknown: the deadline stays where it is, and is what ends the trying.
            _ if lease.is_lost() => {
                self.lose_late(book, lease);
                false
            }
            _ => {
                event!(warn, lock = %lease.name(), ?answer, "cannot renew a lease: trying again");
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
        self.abandon(Arc::clone(&lease.0.attempt), true, String::new());
    }

    fn conclude_release(&self, mut it: Abandoned, answer: &Result<Answer, Failure>) {
        let now = Moment::now();
        let mut book = self.book();
        let Err(failure) = answer else { return self.returned(book) };
        // For as long as the server cannot be reached, it may still have the attempt in its queue. Once the
        // client is gone, nobody waits for that long.
        if failure.is_passing() && (!book.closed || now < it.give_up) {
            it.for_good |= failure.is_unknown();
            book.pursue(it, now + PAUSES.1 / 2);
        } else {
            event!(error, lock = %it.attempt.name, ?failure, "cannot give a lock back: its ttl will");
            self.returned(book);
        }
    }

    fn returned(&self, mut book: MutexGuard<'_, Book>) {
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
        book.due.len() + book.abandoned.len()
    }
}

impl Book {
    fn insert(&mut self, lease: &Lease, due: Moment, bell: &Notify) {
        let entry = &lease.0.entry;
        if entry.over.load(Ordering::Relaxed) {
            return;
        }
        self.entries += 1;
        entry.number.store(self.entries, Ordering::Relaxed);
        entry.due.store(due.as_nanos(), Ordering::Relaxed);
        self.due.insert((due, self.entries), lease.clone());
        if self.sleeps_until.is_some_and(|until| due < until) {
            bell.notify_one();
        }
    }

    fn strike(&mut self, lease: &Lease) {
        let entry = &lease.0.entry;
        entry.over.store(true, Ordering::Relaxed);
        let due = Moment::from_nanos(entry.due.load(Ordering::Relaxed));
        self.due.remove(&(due, entry.number.load(Ordering::Relaxed)));
    }

    fn pursue(&mut self, abandoned: Abandoned, due: Moment) {
        if self.abandoned.len() == ABANDONED
            && let Some((_, _it)) = self.abandoned.pop_first()
        {
            event!(error, lock = %_it.attempt.name, "too many locks to give back: the ttl will");
            self.returning -= 1;
        }
        self.entries += 1;
        self.abandoned.insert((due, self.entries), abandoned);
    }

    /// What is due, or when something will be.
    fn take(&mut self, now: Moment) -> Result<Round, Option<Moment>> {
        let mut round = Round::default();
        while round.renewals.len() < ROUND
            && let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            let lease = first.remove();
            let ttl = lease.next_ttl(now);
            // Held for as long as it may be: it is left to its deadline.
            if ttl.is_some() || (lease.0.attempt.kind.reenters && !lease.is_lost()) {
                round.renewals.push((lease, ttl));
            }
        }
        while round.renewals.len() + round.releases.len() < ROUND
            && let Some(first) = self.abandoned.first_entry()
            && first.key().0 <= now
        {
            round.releases.push(first.remove());
        }
        if round.renewals.is_empty() && round.releases.is_empty() {
            let due = self.due.first_key_value().map(|((due, _), _)| *due);
            let abandoned = self.abandoned.first_key_value().map(|((due, _), _)| *due);
            return Err(due.into_iter().chain(abandoned).min());
        }
        Ok(round)
    }

    /// Where one hold of an owner was lost, its other holds are asked about at once.
    fn hurry(&mut self, lost: &[Lease]) {
        let lost: Vec<_> = lost.iter().filter(|lease| lease.0.attempt.kind.reenters).collect();
        if lost.is_empty() {
            return;
        }
        let owners: HashSet<_> =
            lost.iter().map(|lease| (lease.name(), lease.0.attempt.owner.as_str())).collect();
        let siblings: Vec<_> = self
            .due
            .iter()
            .filter(|(_, lease)| owners.contains(&(lease.name(), lease.0.attempt.owner.as_str())))
            .map(|(key, _)| *key)
            .collect();
        for key in siblings {
            if let Some(lease) = self.due.remove(&key) {
                let now = Moment::now();
                lease.0.entry.due.store(now.as_nanos(), Ordering::Relaxed);
                self.due.insert((now, key.1), lease);
            }
        }
    }
}
