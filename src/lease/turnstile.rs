//! The queue inside a client: of the tasks that wait for one lock, one waits in Redis.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::name::Name;

/// One place per lock, first come first served. A lock that nobody waits for has no entry.
#[derive(Debug, Default)]
pub(super) struct Turnstiles(Arc<Mutex<HashMap<Name, Turnstile>>>);

#[derive(Debug)]
struct Turnstile {
    place: Arc<Semaphore>,
    news: watch::Sender<News>,
    visitors: usize,
    /// How many of them enter at once if their owner holds the lock.
    owned: usize,
}

/// What the tasks of this client that wait for a lock learn without a request of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    None,
    /// This owner has just been granted the lock, here or, as the task at the front has seen,
    /// elsewhere.
    HeldBy(String),
    /// A request of the task at the front has failed.
    Failing,
}

/// A task that waits for the front place. Dropped, it leaves the queue.
#[derive(Debug)]
pub(super) struct Visitor {
    place: Arc<Semaphore>,
    news: watch::Receiver<News>,
    visit: Visit,
}

/// The place at the front, until it is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    // Fields are dropped in this order: first the place is free, then the visit is over.
    _place: Option<OwnedSemaphorePermit>,
    _visit: Visit,
}

#[derive(Debug)]
struct Visit {
    name: Name,
    owned: bool,
    turnstiles: Arc<Mutex<HashMap<Name, Turnstile>>>,
}

impl Turnstiles {
    /// Joins those that wait for a lock; an `owned` one enters at once if its owner holds the lock.
    pub(super) fn visit(&self, name: &Name, owned: bool) -> Visitor {
        let mut turnstiles = lock(&self.0);
        let turnstile = turnstiles.entry(name.clone()).or_insert_with(|| Turnstile {
            place: Arc::new(Semaphore::new(1)),
            news: watch::Sender::new(News::None),
            visitors: 0,
            owned: 0,
        });
        turnstile.visitors += 1;
        turnstile.owned += usize::from(owned);
        Visitor {
            place: Arc::clone(&turnstile.place),
            news: turnstile.news.subscribe(),
            visit: Visit { name: name.clone(), owned, turnstiles: Arc::clone(&self.0) },
        }
    }

    /// Whether there are others than the task at the front that enter once their owner holds the
    /// lock.
    pub(super) fn await_owners(&self, name: &Name, front: &Pass) -> bool {
        let own = usize::from(front._visit.owned);
        lock(&self.0).get(name).is_some_and(|turnstile| turnstile.owned > own)
    }

    /// Wakes the tasks that wait for a lock.
    pub(super) fn announce(&self, name: &Name, news: News) {
        if let Some(turnstile) = lock(&self.0).get(name) {
            turnstile.news.send_replace(news);
        }
    }

    /// Wakes the tasks that wait for a lock if some of them may enter it now.
    pub(super) fn announce_grant(&self, name: &Name, owner: &str) {
        if let Some(turnstile) = lock(&self.0).get(name).filter(|turnstile| turnstile.owned > 0) {
            turnstile.news.send_replace(News::HeldBy(owner.to_owned()));
        }
    }

    /// How many locks are waited for in this process.
    pub(super) fn entries(&self) -> usize {
        lock(&self.0).len()
    }
}

impl Visitor {
    /// The front place, if it is free.
    pub(super) fn try_pass(self) -> Result<Pass, Visitor> {
        match Arc::clone(&self.place).try_acquire_owned() {
            Ok(place) => Ok(Pass { _place: Some(place), _visit: self.visit }),
            Err(_) => Err(self),
        }
    }

    /// Splits the place in the queue, which waits for the front, from what is said to those who
    /// wait.
    pub(super) fn waits(self) -> (impl Future<Output = Pass>, watch::Receiver<News>) {
        let Visitor { place, news, visit } = self;
        let front = async move {
            // It fails only if the semaphore is closed, which nobody does; then there is no queue
            // to keep.
            Pass { _place: place.acquire_owned().await.ok(), _visit: visit }
        };
        (front, news)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut turnstiles = lock(&self.turnstiles);
        if let Some(turnstile) = turnstiles.get_mut(&self.name) {
            turnstile.visitors -= 1;
            turnstile.owned -= usize::from(self.owned);
            if turnstile.visitors == 0 {
                turnstiles.remove(&self.name);
            }
        }
    }
}

/// Poisoning does not matter: nothing under this lock panics.
fn lock(turnstiles: &Mutex<HashMap<Name, Turnstile>>) -> MutexGuard<'_, HashMap<Name, Turnstile>> {
    turnstiles.lock().unwrap_or_else(PoisonError::into_inner)
}
