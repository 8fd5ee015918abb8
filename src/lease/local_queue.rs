//! The queue inside a client: of the tasks that wait for one lock, one waits in Redis.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::name::Name;

/// One queue per lock, first come first served. A lock without local waiters has no entry.
#[derive(Debug, Default)]
pub(super) struct LocalQueues(Arc<Mutex<HashMap<Name, LocalQueue>>>);

#[derive(Debug)]
struct LocalQueue {
    turn: Arc<Semaphore>,
    /// `None` until the first task waits: a lock without competition needs none.
    news: Option<watch::Sender<LockEvent>>,
    waiters: usize,
    /// How many of the tasks may enter at once if their owner holds the lock.
    owned: usize,
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
    news: watch::Receiver<LockEvent>,
    entry: LocalEntry,
}

/// The turn, until it is dropped.
#[derive(Debug)]
pub(super) struct LocalTurn {
    // Fields are dropped in this order: first the turn passes on, then the entry is removed.
    _turn: Option<OwnedSemaphorePermit>,
    _entry: LocalEntry,
}

#[derive(Debug)]
struct LocalEntry {
    name: Name,
    owned: bool,
    local_queues: Arc<Mutex<HashMap<Name, LocalQueue>>>,
}

impl LocalQueues {
    /// Joins the queue of a lock, and takes the turn if no task has it. An `owned` task enters at
    /// once if its owner holds the lock.
    pub(super) fn join(&self, name: &Name, owned: bool) -> Result<LocalTurn, LocalWaiter> {
        let mut local_queues = lock(&self.0);
        let local_queue = local_queues.entry(name.clone()).or_insert_with(|| LocalQueue {
            turn: Arc::new(Semaphore::new(1)),
            news: None,
            waiters: 0,
            owned: 0,
        });
        local_queue.waiters += 1;
        local_queue.owned += usize::from(owned);
        let entry = LocalEntry { name: name.clone(), owned, local_queues: Arc::clone(&self.0) };
        match Arc::clone(&local_queue.turn).try_acquire_owned() {
            Ok(turn) => Ok(LocalTurn { _turn: Some(turn), _entry: entry }),
            // Under the same lock: news after this reach the task.
            Err(_) => {
                let news = local_queue.news.get_or_insert_with(|| watch::Sender::new(LockEvent::None));
                let (turn, news) = (Arc::clone(&local_queue.turn), news.subscribe());
                Err(LocalWaiter { turn, news, entry })
            }
        }
    }

    /// Whether tasks behind the front may enter once their owner holds the lock.
    pub(super) fn await_owners(&self, name: &Name, front: &LocalTurn) -> bool {
        let own = usize::from(front._entry.owned);
        lock(&self.0).get(name).is_some_and(|local_queue| local_queue.owned > own)
    }

    /// Notifies the local waiters of a lock.
    pub(super) fn announce(&self, name: &Name, news: LockEvent) {
        if let Some(sender) = lock(&self.0).get(name).and_then(|local_queue| local_queue.news.as_ref()) {
            sender.send_replace(news);
        }
    }

    /// Notifies the local waiters of a lock if some of them may enter it now.
    pub(super) fn announce_grant(&self, name: &Name, owner: &str) {
        let local_queues = lock(&self.0);
        let local_queue = local_queues.get(name).filter(|local_queue| local_queue.owned > 0);
        if let Some(sender) = local_queue.and_then(|local_queue| local_queue.news.as_ref()) {
            sender.send_replace(LockEvent::HeldBy(owner.to_owned()));
        }
    }

    /// How many locks have local waiters.
    pub(super) fn entries(&self) -> usize {
        lock(&self.0).len()
    }
}

impl LocalWaiter {
    /// Splits the entry into a future of the turn and a receiver of news.
    pub(super) fn waits(self) -> (impl Future<Output = LocalTurn>, watch::Receiver<LockEvent>) {
        let LocalWaiter { turn, news, entry } = self;
        let front = async move {
            // It fails only if the semaphore is closed, which no code does.
            LocalTurn { _turn: turn.acquire_owned().await.ok(), _entry: entry }
        };
        (front, news)
    }
}

impl Drop for LocalEntry {
    fn drop(&mut self) {
        let mut local_queues = lock(&self.local_queues);
        if let Some(local_queue) = local_queues.get_mut(&self.name) {
            local_queue.waiters -= 1;
            local_queue.owned -= usize::from(self.owned);
            if local_queue.waiters == 0 {
                local_queues.remove(&self.name);
            }
        }
    }
}

/// Poisoning does not matter: nothing under this lock panics.
fn lock(local_queues: &Mutex<HashMap<Name, LocalQueue>>) -> MutexGuard<'_, HashMap<Name, LocalQueue>> {
    local_queues.lock().unwrap_or_else(PoisonError::into_inner)
}
