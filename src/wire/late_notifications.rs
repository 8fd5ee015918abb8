//! Messages for those who wait no more.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use uuid::Uuid;

use crate::clock::Moment;

/// A queue lasts for so long, and so does one that a server has from before.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// At most so many are remembered: the latest.
const MOST: usize = 1_024;

/// How soon a further message of one node counts: anybody who may publish can send very many.
const PAUSE: Duration = Duration::from_millis(200);

/// What is to be done about a message that a node sends to one who is gone.
type Answer = Box<dyn Fn(usize) + Send>;

/// Who has been queued and is gone. A server that was set back to an earlier state, and a replica that has not heard of it,
/// still have them in a queue, and would keep a lock for each of them, one after the other.
#[derive(Default)]
pub(super) struct LateNotifications(Mutex<VecDeque<FormerWaiter>>);

struct FormerWaiter {
    id: Uuid,
    since: Moment,
    answer: Answer,
    /// When it was answered last, by the places of the nodes that sent something.
    answered: Vec<(usize, Moment)>,
}

impl FormerWaiter {
    /// Takes note of a message, unless one of the same node was answered just before.
    fn note(&mut self, place: usize) -> bool {
        let now = Moment::now();
        match self.answered.iter_mut().find(|(node, _)| *node == place) {
            Some((_, last)) if now.since(*last) < PAUSE => false,
            Some((_, last)) => {
                *last = now;
                true
            }
            None => {
                self.answered.push((place, now));
                true
            }
        }
    }
}

impl LateNotifications {
    pub(super) fn expect(&self, id: Uuid, answer: Answer) {
        let now = Moment::now();
        let mut former_waiters = self.former_waiters();
        let is_over = |it: &FormerWaiter| now.since(it.since) > QUEUES_LAST;
        while former_waiters.len() >= MOST || former_waiters.front().is_some_and(is_over) {
            former_waiters.pop_front();
        }
        former_waiters.push_back(FormerWaiter { id, since: now, answer, answered: Vec::new() });
    }

    /// A message has come for one who does not wait.
    pub(super) fn receive(&self, id: Uuid, place: usize) {
        if let Some(it) = self.former_waiters().iter_mut().find(|it| it.id == id)
            && it.note(place)
        {
            (it.answer)(place);
        }
    }

    /// Poisoning does not matter: what is in here is whole at any time.
    fn former_waiters(&self) -> MutexGuard<'_, VecDeque<FormerWaiter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LateNotifications {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Strays").field(&self.former_waiters().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_latest_are_remembered() {
        let (late_notifications, received) = (LateNotifications::default(), Arc::new(AtomicUsize::new(0)));
        let ids: Vec<Uuid> = (0..=MOST).map(|_| Uuid::new_v4()).collect();
        for id in &ids {
            let received = Arc::clone(&received);
            late_notifications
                .expect(*id, Box::new(move |place| _ = received.fetch_add(place, Ordering::Relaxed)));
        }
        late_notifications.receive(ids[0], 1);
        assert_eq!(received.load(Ordering::Relaxed), 0);
        late_notifications.receive(ids[1], 1);
        late_notifications.receive(ids[MOST], 2);
        late_notifications.receive(Uuid::new_v4(), 4);
        assert_eq!(received.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_flood_of_messages_of_one_node_is_answered_once() {
        let (late_notifications, received, id) =
            (LateNotifications::default(), Arc::new(AtomicUsize::new(0)), Uuid::new_v4());
        let count = Arc::clone(&received);
        late_notifications.expect(id, Box::new(move |place| _ = count.fetch_add(place, Ordering::Relaxed)));
        (0..100).for_each(|_| late_notifications.receive(id, 1));
        late_notifications.receive(id, 10);
        // 100 of them take far less than a pause.
        assert_eq!(received.load(Ordering::Relaxed), 11);
    }
}
