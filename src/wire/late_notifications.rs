//! [`LateNotifications`]: what to do about messages for attempts that have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::clock::Moment;
use crate::guarded::Guarded;

/// How long a queue lasts, including one that a server has restored from an earlier state.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// The maximum number of remembered attempts: the latest.
const MAX_COUNT: usize = 1_024;

/// The minimum interval between messages of one node that count: any user with the right to publish
/// can send very many.
const LEAST_INTERVAL: Duration = Duration::from_millis(200);

/// The action for a message that a node sends to an attempt that has ended.
type LateAction = Arc<dyn Fn(usize) + Send + Sync>;

/// Attempts that were queued and have ended. A server that was restored from an earlier state, or a
/// replica that did not receive their removal, still has them in a queue, and would hold a lock for
/// each of them, one after the other.
#[derive(Default)]
pub(super) struct LateNotifications(Guarded<VecDeque<FormerWaiter>>);

struct FormerWaiter {
    id: Uuid,
    since: Moment,
    action: LateAction,
    /// When a message was last answered, by the places of the nodes that sent one.
    answered: Vec<(usize, Moment)>,
}

impl FormerWaiter {
    /// Records a message. False if one of the same node was answered just before.
    fn note(&mut self, place: usize) -> bool {
        let now = Moment::now();
        self.answered.retain(|(_, at)| now.since(*at) < LEAST_INTERVAL);
        let is_first = self.answered.iter().all(|(node, _)| *node != place);
        if is_first {
            self.answered.push((place, now));
        }
        is_first
    }
}

impl LateNotifications {
    pub(super) fn expect(&self, id: Uuid, action: LateAction) {
        let now = Moment::now();
        let mut former_waiters = self.0.lock();
        let is_over = |former: &FormerWaiter| now.since(former.since) > QUEUES_LAST;
        while former_waiters.len() >= MAX_COUNT || former_waiters.front().is_some_and(is_over) {
            former_waiters.pop_front();
        }
        former_waiters.push_back(FormerWaiter { id, since: now, action, answered: Vec::new() });
    }

    /// Handles a message for an attempt that does not wait.
    pub(super) fn receive(&self, id: Uuid, place: usize) {
        let to_answer = |waiter: &mut FormerWaiter| waiter.note(place).then(|| Arc::clone(&waiter.action));
        let action = self.0.lock().iter_mut().find(|waiter| waiter.id == id).and_then(to_answer);
        // Called without the lock: the action may log, and a log subscriber may drop another
        // attempt.
        if let Some(action) = action {
            action(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_latest_are_remembered() {
        let (late_notifications, received) = (LateNotifications::default(), Arc::new(AtomicUsize::new(0)));
        let ids: Vec<Uuid> = (0..=MAX_COUNT).map(|_| Uuid::new_v4()).collect();
        for id in &ids {
            let received = Arc::clone(&received);
            late_notifications
                .expect(*id, Arc::new(move |place| _ = received.fetch_add(place, Ordering::Relaxed)));
        }
        late_notifications.receive(ids[0], 1);
        assert_eq!(received.load(Ordering::Relaxed), 0);
        late_notifications.receive(ids[1], 1);
        late_notifications.receive(ids[MAX_COUNT], 2);
        late_notifications.receive(Uuid::new_v4(), 4);
        assert_eq!(received.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn an_action_may_drop_another_attempt() {
        let (late_notifications, id) = (Arc::new(LateNotifications::default()), Uuid::new_v4());
        let within = Arc::clone(&late_notifications);
        late_notifications.expect(id, Arc::new(move |_| within.expect(Uuid::new_v4(), Arc::new(|_| {}))));
        late_notifications.receive(id, 1); // called under the lock, this would deadlock
        assert_eq!(late_notifications.0.lock().len(), 2);
    }

    #[test]
    fn many_messages_of_one_node_are_answered_once() {
        let (late_notifications, received, id) =
            (LateNotifications::default(), Arc::new(AtomicUsize::new(0)), Uuid::new_v4());
        let count = Arc::clone(&received);
        late_notifications.expect(id, Arc::new(move |place| _ = count.fetch_add(place, Ordering::Relaxed)));
        (0..100).for_each(|_| late_notifications.receive(id, 1));
        late_notifications.receive(id, 10);
        // 100 messages take far less than a pause.
        assert_eq!(received.load(Ordering::Relaxed), 11);
    }
}
