//! [`LocalQueues`]: the tasks of this process that wait for one lock, so that one of them waits in
//! Redis for all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::name::Name;

/// One queue per lock, first come first served. A lock without local waiters has no entry.
#[derive(Debug, Default)]
pub(super) struct LocalQueues(Arc<Mutex<HashMap<Name, LocalQueue>>>);

#[derive(Debug)]
struct LocalQueue {
    /// Where tasks wait for their turn. `None` until the first one waits: the first task has the
    /// turn without a permit.
    turn: Option<Arc<Semaphore>>,
    /// `None` until the first task waits: a lock without competition needs none.
    events: Option<watch::Sender<LockEvent>>,
    waiters: usize,
    /// How many of the tasks may enter at once if their owner holds the lock.
    entering: usize,
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
#[derive(Debug)]
pub(super) struct LocalWaiter {
    turn: Arc<Semaphore>,
    events: watch::Receiver<LockEvent>,
    entry: LocalEntry,
}

/// The turn, until it is dropped.
#[derive(Debug)]
pub(super) struct LocalTurn {
    // Fields are dropped in this order: first the next task gets the turn, then the entry is
    // removed.
    _turn: Option<OwnedSemaphorePermit>,
    _entry: LocalEntry,
}

#[derive(Debug)]
struct LocalEntry {
    name: Name,
    may_enter: bool,
    /// It had the turn when it joined the empty queue.
    is_first: bool,
    local_queues: Arc<Mutex<HashMap<Name, LocalQueue>>>,
}

impl LocalQueues {
    /// Joins the queue of a lock, and takes the turn if no task has it. A task that `may_enter`
    /// enters at once if its owner holds the lock.
    pub(super) fn join(&self, name: &Name, may_enter: bool) -> Result<LocalTurn, LocalWaiter> {
        let mut local_queues = lock(&self.0);
        let local_queue = local_queues.entry(name.clone()).or_insert_with(|| LocalQueue {
            turn: None,
            events: None,
            waiters: 0,
            entering: 0,
        });
        local_queue.waiters += 1;
        local_queue.entering += usize::from(may_enter);
        let is_first = local_queue.waiters == 1;
        let entry = LocalEntry { name: name.clone(), may_enter, is_first, local_queues: Arc::clone(&self.0) };
        if is_first {
            return Ok(LocalTurn { _turn: None, _entry: entry });
        }
        let turn = Arc::clone(local_queue.turn.get_or_insert_with(|| Arc::new(Semaphore::new(0))));
        match Arc::clone(&turn).try_acquire_owned() {
            Ok(turn) => Ok(LocalTurn { _turn: Some(turn), _entry: entry }),
            // Under the same lock: events after this reach the task.
            Err(_) => {
                let events = local_queue.events.get_or_insert_with(|| watch::Sender::new(LockEvent::None));
                Err(LocalWaiter { turn, events: events.subscribe(), entry })
            }
        }
    }

    /// Whether tasks behind the front may enter once their owner holds the lock.
    pub(super) fn has_nested_waiters_behind(&self, name: &Name, front: &LocalTurn) -> bool {
        let own = usize::from(front._entry.may_enter);
        lock(&self.0).get(name).is_some_and(|local_queue| local_queue.entering > own)
    }

    /// Notifies the local waiters of a lock.
    pub(super) fn announce(&self, name: &Name, event: LockEvent) {
        if let Some(sender) = lock(&self.0).get(name).and_then(|local_queue| local_queue.events.as_ref()) {
            sender.send_replace(event);
        }
    }

    /// Notifies the local waiters of a lock if some of them may enter it now.
    pub(super) fn announce_grant(&self, name: &Name, owner: &str) {
        let local_queues = lock(&self.0);
        let local_queue = local_queues.get(name).filter(|local_queue| local_queue.entering > 0);
        if let Some(sender) = local_queue.and_then(|local_queue| local_queue.events.as_ref()) {
            sender.send_replace(LockEvent::HeldBy(owner.to_owned()));
        }
    }

    /// How many locks have local waiters.
    pub(super) fn entries(&self) -> usize {
        lock(&self.0).len()
    }
}

impl LocalWaiter {
    /// Splits the waiter into a future of the turn and a receiver of events.
    pub(super) fn split(self) -> (impl Future<Output = LocalTurn>, watch::Receiver<LockEvent>) {
        let LocalWaiter { turn, events, entry } = self;
        let front = async move {
            // It fails only if the semaphore is closed, which no code does.
            LocalTurn { _turn: turn.acquire_owned().await.ok(), _entry: entry }
        };
        (front, events)
    }
}

impl Drop for LocalEntry {
    fn drop(&mut self) {
        let mut local_queues = lock(&self.local_queues);
        if let Some(local_queue) = local_queues.get_mut(&self.name) {
            local_queue.waiters -= 1;
            local_queue.entering -= usize::from(self.may_enter);
            if local_queue.waiters == 0 {
                local_queues.remove(&self.name);
            } else if let Some(turn) = local_queue.turn.clone().filter(|_| self.is_first) {
                drop(local_queues);
                turn.add_permits(1);
            }
        }
    }
}

/// Poisoning does not matter: nothing under this lock panics.
fn lock(local_queues: &Mutex<HashMap<Name, LocalQueue>>) -> MutexGuard<'_, HashMap<Name, LocalQueue>> {
    local_queues.lock().unwrap_or_else(PoisonError::into_inner)
}
