//! [`Mailboxes`]: messages for waiting attempts. [`LateNotifications`]: messages for attempts that
//! no longer wait.

use super::NodeSet;
use super::deployment::majority_of;
use crate::clock::Moment;
use crate::labels::attempt_id;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use uuid::Uuid;

/// How long the first node's message waits for those of other nodes, until a majority has sent one.
const GATHERING: Duration = Duration::from_millis(20);

/// The mailboxes, and the state of the subscriptions.
#[derive(Debug)]
pub(super) struct Mailboxes {
    slots: Mutex<HashMap<Uuid, Arc<MailboxSlot>>>,
    pub(super) late_notifications: LateNotifications,
    /// The state of each node's subscription.
    pub(super) states: watch::Sender<Vec<SubscriptionState>>,
    /// The number of nodes that form a majority.
    pub(super) majority: usize,
    /// Counts subscriptions made; 0 while fewer than a majority are made.
    pub(super) subscription: AtomicU64,
    made: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubscriptionState {
    Connecting,
    Subscribed,
    Failed,
    /// The subscription does not receive messages that are published where requests go.
    Elsewhere,
}

#[derive(Debug, Default)]
struct MailboxSlot {
    message: Mutex<Option<(String, NodeSet)>>,
    notify: Notify,
}

/// Receives the messages for one id until it is dropped.
#[derive(Debug)]
pub(crate) struct Mailbox {
    id: Uuid,
    slot: Arc<MailboxSlot>,
    mailboxes: Arc<Mailboxes>,
}

impl Mailbox {
    pub(super) fn new(mailboxes: &Arc<Mailboxes>, id: Uuid) -> Mailbox {
        let slot = Arc::new(MailboxSlot::default());
        mailboxes.slots().insert(id, Arc::clone(&slot));
        Mailbox { id, slot, mailboxes: Arc::clone(mailboxes) }
    }

    /// Waits for a message: in a quorum, of a majority, or of the nodes whose messages come soon
    /// after the first. `None`: messages may have been missed, so the waiter must poll.
    ///
    /// # Cancel safety
    /// Cancel safe: a message stays until it is taken.
    pub(crate) async fn wait(&self) -> Option<String> {
        // The notification may be left over from an earlier wait that was given up.
        if self.slot.senders() == 0 {
            self.slot.notify.notified().await;
        }
        if self.slot.senders() > 0 {
            let _few = timeout(GATHERING, async {
                while self.slot.senders() < self.mailboxes.majority {
                    self.slot.notify.notified().await;
                }
            })
            .await;
        }
        self.slot.take()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.mailboxes.slots().remove(&self.id);
    }
}

impl Mailboxes {
    /// For subscriptions on this number of nodes.
    pub(super) fn new(nodes: usize) -> Mailboxes {
        Mailboxes {
            slots: Mutex::default(),
            late_notifications: LateNotifications::default(),
            states: watch::Sender::new(vec![SubscriptionState::Connecting; nodes]),
            majority: majority_of(nodes),
            subscription: AtomicU64::new(0),
            made: AtomicU64::new(0),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots().len()
    }

    /// Poisoning does not matter: no code under this lock panics.
    fn slots(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<MailboxSlot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deliver(&self, place: usize, payload: &[u8]) {
        let Some((attempts, rest)) = std::str::from_utf8(payload).ok().and_then(|text| text.split_once(' '))
        else {
            return; // not ours: other users may publish here
        };
        for id in attempts.split(',').filter_map(attempt_id) {
            let slot = self.slots().get(&id).cloned();
            match slot {
                Some(slot) => {
                    slot.put(place, rest);
                    slot.notify.notify_one();
                }
                None => self.late_notifications.receive(id, place),
            }
        }
    }

    /// Counts another subscription.
    pub(super) fn count_made(&self) {
        self.made.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the state of a node's subscription.
    pub(super) fn set_state(&self, place: usize, state: SubscriptionState) {
        self.states.send_modify(|states| {
            states[place] = state;
            let count_in = states.iter().filter(|state| **state == SubscriptionState::Subscribed).count();
            let number = if count_in >= self.majority { self.made.load(Ordering::SeqCst) } else { 0 };
            self.subscription.store(number, Ordering::SeqCst);
        });
    }

    /// Makes all waiters poll: messages may have been missed.
    pub(super) fn notify_all(&self) {
        for slot in self.slots().values() {
            slot.notify.notify_one();
        }
    }
}

impl MailboxSlot {
    fn put(&self, place: usize, message: &str) {
        let mut slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        let senders = slot.take().map_or(NodeSet::of([]), |(_, senders)| senders);
        *slot = Some((message.to_owned(), senders.with(place)));
    }

    /// Takes the message, and the notification that came with it.
    fn take(&self) -> Option<String> {
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner).take();
        let notified = self.notify.notified();
        tokio::pin!(notified);
        notified.enable();
        message.map(|(message, _)| message)
    }

    fn senders(&self) -> usize {
        let slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map_or(0, |(_, senders)| senders.len())
    }
}

/// How long a queue lasts, including one that a server has restored from an earlier state.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// The maximum number of remembered attempts: the latest.
const MAX_COUNT: usize = 1_024;

/// The minimum interval between messages of one node that count: any user with the right to publish
/// can send very many.
const PAUSE: Duration = Duration::from_millis(200);

/// The action for a message that a node sends to an attempt that has ended.
type Answer = Arc<dyn Fn(usize) + Send + Sync>;

/// Attempts that were queued and have ended. A server that was restored from an earlier state, or a
/// replica that did not receive their removal, still has them in a queue, and would hold a lock for
/// each of them, one after the other.
#[derive(Default)]
pub(super) struct LateNotifications(Mutex<VecDeque<FormerWaiter>>);

struct FormerWaiter {
    id: Uuid,
    since: Moment,
    answer: Answer,
    /// When a message was last answered, by the places of the nodes that sent one.
    answered: Vec<(usize, Moment)>,
}

impl FormerWaiter {
    /// Records a message. False if one of the same node was answered just before.
    fn note(&mut self, place: usize) -> bool {
        let now = Moment::now();
        self.answered.retain(|(_, at)| now.since(*at) < PAUSE);
        let is_first = self.answered.iter().all(|(node, _)| *node != place);
        if is_first {
            self.answered.push((place, now));
        }
        is_first
    }
}

impl LateNotifications {
    pub(super) fn expect(&self, id: Uuid, answer: Answer) {
        let now = Moment::now();
        let mut former_waiters = self.former_waiters();
        let is_over = |former: &FormerWaiter| now.since(former.since) > QUEUES_LAST;
        while former_waiters.len() >= MAX_COUNT || former_waiters.front().is_some_and(is_over) {
            former_waiters.pop_front();
        }
        former_waiters.push_back(FormerWaiter { id, since: now, answer, answered: Vec::new() });
    }

    /// Handles a message for an attempt that does not wait.
    pub(super) fn receive(&self, id: Uuid, place: usize) {
        // Called without the lock: the answer may log, and a log subscriber may drop another
        // attempt.
        let answer = self.answer(id, place);
        answer.inspect(|answer| answer(place));
    }

    fn answer(&self, id: Uuid, place: usize) -> Option<Answer> {
        let mut former_waiters = self.former_waiters();
        let waiter = former_waiters.iter_mut().find(|waiter| waiter.id == id)?;
        waiter.note(place).then(|| Arc::clone(&waiter.answer))
    }

    /// Poisoning does not matter: the queue is consistent at any time.
    fn former_waiters(&self) -> MutexGuard<'_, VecDeque<FormerWaiter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LateNotifications {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LateNotifications").field(&self.former_waiters().len()).finish()
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
    fn an_answer_may_drop_another_attempt() {
        let (late_notifications, id) = (Arc::new(LateNotifications::default()), Uuid::new_v4());
        let within = Arc::clone(&late_notifications);
        late_notifications.expect(id, Arc::new(move |_| within.expect(Uuid::new_v4(), Arc::new(|_| {}))));
        late_notifications.receive(id, 1); // called under the lock, this would deadlock
        assert_eq!(late_notifications.former_waiters().len(), 2);
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
