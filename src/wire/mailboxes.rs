//! [`Mailboxes`]: the messages for the attempts that wait. [`LateNotifications`]: those for attempts
//! that wait no more.

use super::NodeSet;
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

/// How long the first node's message waits for those of others, until more than half have sent one.
const GATHERING: Duration = Duration::from_millis(20);

/// The mailboxes, and how the subscriptions stand.
#[derive(Debug)]
pub(super) struct Mailboxes {
    slots: Mutex<HashMap<Uuid, Arc<MailboxSlot>>>,
    pub(super) late_notifications: LateNotifications,
    /// How each node's subscription stands.
    pub(super) states: watch::Sender<Vec<SubscriptionState>>,
    /// How many it takes.
    pub(super) majority: usize,
    /// Counts subscriptions made; 0 while there are too few.
    pub(super) subscription: AtomicU64,
    made: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubscriptionState {
    Connecting,
    Subscribed,
    Failed,
    /// What is published where requests go is not heard there.
    Elsewhere,
}

#[derive(Debug, Default)]
struct MailboxSlot {
    message: Mutex<Option<(String, NodeSet)>>,
    bell: Notify,
}

/// Gets the messages for one id, until it is dropped.
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

    /// Waits for a message, of several nodes from more than half of them or what comes soon after the first. `None`:
    /// messages may have been missed, so go and look.
    ///
    /// # Cancel safety
    /// A message stays until it is taken.
    pub(crate) async fn wait(&self) -> Option<String> {
        // What rang may have been waited for before, by one who gave up.
        if self.slot.senders() == 0 {
            self.slot.bell.notified().await;
        }
        if self.slot.senders() > 0 {
            let _few = timeout(GATHERING, async {
                while self.slot.senders() < self.mailboxes.majority {
                    self.slot.bell.notified().await;
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
    /// For subscriptions on so many nodes.
    pub(super) fn new(nodes: usize) -> Mailboxes {
        Mailboxes {
            slots: Mutex::default(),
            late_notifications: LateNotifications::default(),
            states: watch::Sender::new(vec![SubscriptionState::Connecting; nodes]),
            majority: nodes / 2 + 1,
            subscription: AtomicU64::new(0),
            made: AtomicU64::new(0),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots().len()
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn slots(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<MailboxSlot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deliver(&self, place: usize, payload: &[u8]) {
        let Some((attempts, rest)) = std::str::from_utf8(payload).ok().and_then(|text| text.split_once(' '))
        else {
            return; // not one of ours: anybody may publish
        };
        for id in attempts.split(',').filter_map(attempt_id) {
            let slot = self.slots().get(&id).cloned();
            match slot {
                Some(slot) => {
                    slot.put(place, rest);
                    slot.bell.notify_one();
                }
                None => self.late_notifications.receive(id, place),
            }
        }
    }

    /// Takes note of another subscription.
    pub(super) fn count_made(&self) {
        self.made.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes note of how a node's subscription stands.
    pub(super) fn set_state(&self, place: usize, state: SubscriptionState) {
        self.states.send_modify(|states| {
            states[place] = state;
            let standing = states.iter().filter(|state| **state == SubscriptionState::Subscribed).count();
            let number = if standing >= self.majority { self.made.load(Ordering::SeqCst) } else { 0 };
            self.subscription.store(number, Ordering::SeqCst);
        });
    }

    /// Has all waiters look: messages may have been missed.
    pub(super) fn notify_all(&self) {
        for slot in self.slots().values() {
            slot.bell.notify_one();
        }
    }
}

impl MailboxSlot {
    fn put(&self, place: usize, message: &str) {
        let mut slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        let senders = slot.take().map_or(NodeSet::of([]), |(_, senders)| senders);
        *slot = Some((message.to_owned(), senders.with(place)));
    }

    /// The message, and the ring that came with it.
    fn take(&self) -> Option<String> {
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner).take();
        let notified = self.bell.notified();
        tokio::pin!(notified);
        notified.enable();
        message.map(|(message, _)| message)
    }

    fn senders(&self) -> usize {
        let slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map_or(0, |(_, senders)| senders.len())
    }
}

/// A queue lasts for so long, and so does one that a server has from before.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// At most so many are remembered: the latest.
const MOST: usize = 1_024;

/// How soon a further message of one node counts: anybody who may publish can send very many.
const PAUSE: Duration = Duration::from_millis(200);

/// What is to be done about a message that a node sends to one who is gone.
type Answer = Arc<dyn Fn(usize) + Send + Sync>;

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
        let is_over = |it: &FormerWaiter| now.since(it.since) > QUEUES_LAST;
        while former_waiters.len() >= MOST || former_waiters.front().is_some_and(is_over) {
            former_waiters.pop_front();
        }
        former_waiters.push_back(FormerWaiter { id, since: now, answer, answered: Vec::new() });
    }

    /// A message has come for one who does not wait.
    pub(super) fn receive(&self, id: Uuid, place: usize) {
        // Called without the lock: it may log, and a subscriber may drop another attempt.
        let answer = self.answer(id, place);
        answer.inspect(|answer| answer(place));
    }

    fn answer(&self, id: Uuid, place: usize) -> Option<Answer> {
        let mut former_waiters = self.former_waiters();
        let waiter = former_waiters.iter_mut().find(|waiter| waiter.id == id)?;
        waiter.note(place).then(|| Arc::clone(&waiter.answer))
    }

    /// Poisoning does not matter: what is in here is whole at any time.
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
        let ids: Vec<Uuid> = (0..=MOST).map(|_| Uuid::new_v4()).collect();
        for id in &ids {
            let received = Arc::clone(&received);
            late_notifications
                .expect(*id, Arc::new(move |place| _ = received.fetch_add(place, Ordering::Relaxed)));
        }
        late_notifications.receive(ids[0], 1);
        assert_eq!(received.load(Ordering::Relaxed), 0);
        late_notifications.receive(ids[1], 1);
        late_notifications.receive(ids[MOST], 2);
        late_notifications.receive(Uuid::new_v4(), 4);
        assert_eq!(received.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn an_answer_may_drop_another_attempt() {
        let (late_notifications, id) = (Arc::new(LateNotifications::default()), Uuid::new_v4());
        let within = Arc::clone(&late_notifications);
        late_notifications.expect(id, Arc::new(move |_| within.expect(Uuid::new_v4(), Arc::new(|_| {}))));
        late_notifications.receive(id, 1); // under its lock, it would wait for itself for ever
        assert_eq!(late_notifications.former_waiters().len(), 2);
    }

    #[test]
    fn a_flood_of_messages_of_one_node_is_answered_once() {
        let (late_notifications, received, id) =
            (LateNotifications::default(), Arc::new(AtomicUsize::new(0)), Uuid::new_v4());
        let count = Arc::clone(&received);
        late_notifications.expect(id, Arc::new(move |place| _ = count.fetch_add(place, Ordering::Relaxed)));
        (0..100).for_each(|_| late_notifications.receive(id, 1));
        late_notifications.receive(id, 10);
        // 100 of them take far less than a pause.
        assert_eq!(received.load(Ordering::Relaxed), 11);
    }
}
