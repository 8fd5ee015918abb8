//! The queue inside a client: of the tasks that wait for one lock, one waits in Redis.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::name::Name;

/// One place per lock, first come first served. A lock that nobody waits for has no entry.
#[derive(Debug, Default)]
pub(super) struct Turnstiles(Arc<Mutex<HashMap<Name, Turnstile>>>);

#[derive(Debug)]
struct Turnstile {
    place: Arc<Semaphore>,
    visitors: usize,
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
    turnstiles: Arc<Mutex<HashMap<Name, Turnstile>>>,
}

impl Turnstiles {
    /// The front place if nobody is at it.
    pub(super) fn try_enter(&self, name: &Name) -> Option<Pass> {
        let (visit, place) = self.visit(name);
        let place = place.try_acquire_owned().ok()?;
        Some(Pass { _place: Some(place), _visit: visit })
    }

    /// Waits for the front place.
    ///
    /// # Cancel safety
    /// Dropping it leaves the queue.
    pub(super) async fn enter(&self, name: &Name) -> Pass {
        let (visit, place) = self.visit(name);
        // It fails only if the semaphore is closed, which nobody does; then there is no queue to keep.
        let place = place.acquire_owned().await.ok();
        Pass { _place: place, _visit: visit }
    }

    /// How many locks are waited for in this process.
    pub(super) fn entries(&self) -> usize {
        lock(&self.0).len()
    }

    fn visit(&self, name: &Name) -> (Visit, Arc<Semaphore>) {
        let mut turnstiles = lock(&self.0);
        let turnstile = turnstiles
            .entry(name.clone())
            .or_insert_with(|| Turnstile { place: Arc::new(Semaphore::new(1)), visitors: 0 });
        turnstile.visitors += 1;
        (Visit { name: name.clone(), turnstiles: Arc::clone(&self.0) }, Arc::clone(&turnstile.place))
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut turnstiles = lock(&self.turnstiles);
        if let Some(turnstile) = turnstiles.get_mut(&self.name) {
            turnstile.visitors -= 1;
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
