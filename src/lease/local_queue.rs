//! [`LocalQueues`]: the tasks of this process that wait for one lock, so that one of them waits in
//! Redis for all.

use std::collections::HashMap;
use std::pin::pin;
use std::ptr;
use std::sync::{Arc, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::recent_locks::RecentLocks;
use super::turn::Turn;
use crate::clock::Moment;
use crate::guarded::Guarded;
use crate::name::Name;

/// One queue per lock, first come first served.
#[derive(Default)]
pub(super) struct LocalQueues(Arc<Guarded<Queues>>);

#[derive(Default)]
struct Queues {
    /// A lock without local waiters has no entry.
    by_name: HashMap<Name, LocalQueue>,
    recent: RecentLocks,
    /// The newest turn of each lock that tasks may join, while it lasts.
    shared_turns: HashMap<Name, Weak<dyn Turn>>,
}

#[derive(Default)]
struct LocalQueue {
    /// Where tasks wait to come to the front. `None` until the first one waits: the first task is
    /// there without a permit.
    places: Option<Arc<Semaphore>>,
    /// `None` until the first task waits: a lock without competition needs none.
    events: Option<watch::Sender<LockEvent>>,
    waiters: usize,
    /// How many more tasks than one may be at the front: they join a turn together.
    admitted: usize,
    /// How many of the tasks may enter at once if their owner holds the lock.
    entering: usize,
    /// A hold that the task at the front is to receive.
    passed: Option<Arc<dyn Turn>>,
    /// The turn that began last, if it lasts.
    turn: Option<Weak<dyn Turn>>,
    /// How many holds in a row took longer than a turn.
    slow_holds: u32,
}

/// What the local waiters of a lock learn without a request of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LockEvent {
    None,
    /// This owner was granted the lock, by this client or, as the task at the front noticed,
    /// elsewhere.
    HeldBy(String),
    /// A request of the task at the front has failed.
    Failing,
}

/// A task that waits for its turn. Dropped, it leaves the queue.
pub(super) struct LocalWaiter {
    places: Arc<Semaphore>,
    events: watch::Receiver<LockEvent>,
    entry: LocalEntry,
}

/// The place at the front, until it is dropped.
pub(super) struct LocalFront {
    // Fields are dropped in this order: first the entry is removed, then the next task comes to the
    // front. Otherwise it might pass its hold to this task, which has left.
    entry: LocalEntry,
    permit: Option<OwnedSemaphorePermit>,
}

struct LocalEntry {
    name: Name,
    may_enter: bool,
    /// It was at the front when it joined the empty queue.
    is_first: bool,
    /// Tasks competed for the lock lately.
    expects_others: bool,
    local_queues: Arc<Guarded<Queues>>,
}

impl LocalQueues {
    /// Joins the queue of a lock, and comes to the front if no task is there. A task that
    /// `may_enter` enters at once if its owner holds the lock.
    pub(super) fn join(&self, name: &Name, may_enter: bool) -> Result<LocalFront, LocalWaiter> {
        let mut local_queues = self.0.lock();
        let is_first = !local_queues.by_name.contains_key(name);
        let expects_others = local_queues.recent.of(name).expects_others(!is_first);
        let local_queue = local_queues.by_name.entry(name.clone()).or_default();
        local_queue.waiters += 1;
        local_queue.entering += usize::from(may_enter);
        let (name, local_queues) = (name.clone(), Arc::clone(&self.0));
        let entry = LocalEntry { name, may_enter, is_first, expects_others, local_queues };
        if is_first {
            return Ok(LocalFront { permit: None, entry });
        }
        let places = Arc::clone(local_queue.places.get_or_insert_with(|| Arc::new(Semaphore::new(0))));
        match Arc::clone(&places).try_acquire_owned() {
            Ok(permit) => Ok(LocalFront { permit: Some(permit), entry }),
            // Under the same lock: events after this reach the task.
            Err(_) => {
                let events = local_queue.events.get_or_insert_with(|| watch::Sender::new(LockEvent::None));
                Err(LocalWaiter { places, events: events.subscribe(), entry })
            }
        }
    }

    /// Whether tasks behind the front may enter once their owner holds the lock.
    pub(super) fn has_nested_waiters_behind(&self, name: &Name, front: &LocalFront) -> bool {
        let own = usize::from(front.entry.may_enter);
        self.0.lock().by_name.get(name).is_some_and(|local_queue| local_queue.entering > own)
    }

    /// Notifies the local waiters of a lock.
    pub(super) fn announce(&self, name: &Name, event: LockEvent) {
        let events = self.0.lock().by_name.get(name).and_then(|local_queue| local_queue.events.clone());
        if let Some(events) = events {
            events.send_replace(event); // not under the lock: it runs the wakers of tasks
        }
    }

    /// Notifies the local waiters of a lock if some of them may enter it now.
    pub(super) fn announce_grant(&self, name: &Name, owner: &str) {
        if self.0.lock().by_name.get(name).is_some_and(|local_queue| local_queue.entering > 0) {
            self.announce(name, LockEvent::HeldBy(owner.to_owned()));
        }
    }

    /// What this client holds may have been revoked: ends its turn. A hold that was granted before,
    /// and of which it has yet to learn, begins none.
    pub(super) fn note_revoked(&self, name: &Name) {
        self.0.lock().recent.of(name).revoked_at = Some(Moment::now());
        self.end_turn(name);
    }

    /// Whether this client may have revoked a hold that was granted soon after `counts_from`.
    pub(super) fn may_be_revoked(&self, name: &Name, counts_from: Moment) -> bool {
        self.0.lock().recent.of(name).revoked_at.is_some_and(|revoked_at| counts_from <= revoked_at)
    }

    /// Ends the turn of this client, as if its time were over.
    pub(super) fn end_turn(&self, name: &Name) {
        let (turn, shared_turn) = {
            let local_queues = self.0.lock();
            let shared_turn = local_queues.shared_turns.get(name).cloned();
            let local_queue = local_queues.by_name.get(name);
            (local_queue.and_then(|local_queue| local_queue.turn.clone()), shared_turn)
        };
        // Not under the lock: it wakes a task.
        turn.iter().chain(&shared_turn).filter_map(Weak::upgrade).for_each(|turn| turn.end());
    }

    /// Ends the turns of all locks, since the client closes: no task receives what it has passed.
    pub(super) fn end_turns(&self) {
        let turns: Vec<_> = {
            let local_queues = self.0.lock();
            let turns = local_queues.by_name.values().filter_map(|local_queue| local_queue.turn.as_ref());
            turns.chain(local_queues.shared_turns.values()).filter_map(Weak::upgrade).collect()
        };
        turns.iter().for_each(|turn| turn.end());
    }

    /// The newest turn that tasks may join.
    pub(super) fn shared_turn(&self, name: &Name) -> Option<Arc<dyn Turn>> {
        self.0.lock().shared_turns.get(name)?.upgrade()
    }

    /// Tasks may join this turn from now on, and none an earlier one.
    pub(super) fn share_turn(&self, name: &Name, turn: Weak<dyn Turn>) {
        let earlier = self.0.lock().shared_turns.insert(name.clone(), turn);
        earlier.and_then(|earlier| earlier.upgrade()).into_iter().for_each(|earlier| earlier.end());
    }

    /// No task joins this turn from now on.
    pub(super) fn unshare_turn(&self, name: &Name, turn: &dyn Turn) {
        let mut local_queues = self.0.lock();
        if local_queues.shared_turns.get(name).is_some_and(|newest| ptr::addr_eq(newest.as_ptr(), turn)) {
            local_queues.shared_turns.remove(name);
        }
    }

    /// The server has granted this token of a lock, or may have.
    pub(super) fn note_token(&self, name: &Name, token: u64) {
        let mut local_queues = self.0.lock();
        let last_token = &mut local_queues.recent.of(name).last_token;
        *last_token = token.max(*last_token);
    }

    /// A hold was short enough to be passed on.
    pub(super) fn note_quick(&self, name: &Name) {
        if let Some(local_queue) = self.0.lock().by_name.get_mut(name) {
            local_queue.slow_holds = 0;
        }
    }

    /// How many locks have local waiters.
    pub(super) fn entries(&self) -> usize {
        self.0.lock().by_name.len()
    }
}

impl LocalWaiter {
    /// Splits the waiter into a future of the front and a receiver of events.
    pub(super) fn split(self) -> (impl Future<Output = LocalFront>, watch::Receiver<LockEvent>) {
        let LocalWaiter { places, events, entry } = self;
        let front = async move {
            let permit = pin!(places.acquire_owned());
            // Dropped before the permit, as in a `LocalFront`.
            let entry = entry;
            // It fails only if the semaphore is closed, which no code does.
            LocalFront { permit: permit.await.ok(), entry }
        };
        (front, events)
    }
}

impl LocalFront {
    /// Whether other tasks of this client compete for the lock: this one has waited for them, or
    /// some wait behind it.
    pub(super) fn is_contended(&self) -> bool {
        self.permit.is_some() || self.has_waiters_behind()
    }

    /// Whether it is worth while to reserve tokens for other tasks of this client.
    pub(super) fn expects_others(&self) -> bool {
        self.entry.expects_others || self.is_contended()
    }

    pub(super) fn has_waiters_behind(&self) -> bool {
        self.with_queue(|local_queue| local_queue.waiters > 1)
    }

    /// Whether holds take too long to be passed on. One alone may be that of a busy machine.
    pub(super) fn is_slow(&self) -> bool {
        self.with_queue(|local_queue| local_queue.slow_holds > 1)
    }

    pub(super) fn note_slow(&self, is_slow: bool) {
        self.with_queue(|local_queue| {
            local_queue.slow_holds = if is_slow { local_queue.slow_holds.saturating_add(1) } else { 0 };
        });
    }

    /// A turn begins.
    pub(super) fn note_turn(&self, turn: Option<Weak<dyn Turn>>) {
        self.with_queue(|local_queue| local_queue.turn = turn);
    }

    /// A token that is not smaller than the last one that the server has granted to this client.
    pub(super) fn last_token(&self) -> u64 {
        self.entry.local_queues.lock().recent.of(&self.entry.name).last_token
    }

    /// All tasks that wait behind come to the front, to join this turn.
    pub(super) fn admit_all(&self, turn: Weak<dyn Turn>) {
        let (places, behind) = self.with_queue(|local_queue| {
            let behind = local_queue.waiters - 1 - local_queue.admitted.min(local_queue.waiters - 1);
            local_queue.turn = Some(turn);
            local_queue.admitted += behind;
            (local_queue.places.clone(), behind)
        });
        places.into_iter().for_each(|places| places.add_permits(behind)); // it runs wakers
    }

    /// Whether others are at the front as well: one of them is to ask the server for all.
    pub(super) fn is_one_of_several(&self) -> bool {
        self.with_queue(|local_queue| local_queue.admitted > 0)
    }

    /// Leaves the front, and a hold to the task that comes there next. False if none waits: then
    /// the hold stays.
    pub(super) fn pass(self, passed: Arc<dyn Turn>) -> bool {
        self.with_queue(|local_queue| {
            let is_received = local_queue.waiters > 1;
            if is_received {
                local_queue.passed = Some(passed);
            }
            is_received
        })
    }

    /// The hold that was left to the task that is at the front.
    pub(super) fn take_passed(&self) -> Option<Arc<dyn Turn>> {
        self.with_queue(|local_queue| local_queue.passed.take())
    }

    fn with_queue<T: Default>(&self, work: impl FnOnce(&mut LocalQueue) -> T) -> T {
        // This entry keeps the queue.
        self.entry.local_queues.lock().by_name.get_mut(&self.entry.name).map(work).unwrap_or_default()
    }
}

impl Drop for LocalFront {
    fn drop(&mut self) {
        let is_last = self.with_queue(|local_queue| {
            let is_last = local_queue.admitted == 0;
            local_queue.admitted = local_queue.admitted.saturating_sub(1);
            is_last
        });
        if !is_last {
            // Others are at the front already, so its place goes to none, whether it has a permit.
            self.entry.is_first = false;
            self.permit.take().into_iter().for_each(OwnedSemaphorePermit::forget);
        }
    }
}

impl Drop for LocalEntry {
    fn drop(&mut self) {
        let mut local_queues = self.local_queues.lock();
        if let Some(local_queue) = local_queues.by_name.get_mut(&self.name) {
            local_queue.waiters -= 1;
            local_queue.entering -= usize::from(self.may_enter);
            if local_queue.waiters == 0 {
                let removed = local_queues.by_name.remove(&self.name);
                // Of two turns that began at the same time, the newest may be the other one.
                let shared_turn = local_queues.shared_turns.get(&self.name).and_then(Weak::upgrade);
                drop(local_queues);
                let turn = removed.as_ref().and_then(|local_queue| local_queue.turn.as_ref()?.upgrade());
                drop(removed); // not under the lock: it may have a hold that no task will receive
                turn.iter().chain(&shared_turn).for_each(|turn| turn.queue_is_empty());
            } else if let Some(places) = local_queue.places.clone().filter(|_| self.is_first) {
                drop(local_queues);
                places.add_permits(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails")]
    use super::*;

    struct AnyTurn;

    impl Turn for AnyTurn {
        fn end(&self) {}
    }

    /// Those that came to the front together leave it before the next one comes there: else two
    /// tasks ask the server.
    #[tokio::test]
    async fn one_task_is_at_the_front_after_those_of_a_turn() {
        let local_queues = LocalQueues::default();
        let name = Name::new("", "x").unwrap();
        let waits = || match local_queues.join(&name, false) {
            Ok(_) => panic!("it is at the front"),
            Err(waiter) => Box::pin(waiter.split().0),
        };
        let Ok(first) = local_queues.join(&name, false) else { panic!("the queue is empty") };
        let (second, third) = (waits(), waits());
        let turn: Arc<dyn Turn> = Arc::new(AnyTurn);
        first.admit_all(Arc::downgrade(&turn));
        let (second, third) = (second.await, third.await);
        drop(first);
        let mut fourth = waits();
        drop(second);
        let early =
            std::future::poll_fn(|context| std::task::Poll::Ready(fourth.as_mut().poll(context))).await;
        assert!(early.is_pending(), "the third task is at the front");
        drop(third);
        assert!(!fourth.await.is_one_of_several());
    }
}
