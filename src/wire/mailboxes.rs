//! [`Mailbox`]: the messages for one waiter. [`Mailboxes`]: those of all waiters of a client, and
//! the state of the subscriptions that fill them.
//!
//! A message is what a script publishes when it grants a lock to waiters, as `lua/README.md`
//! specifies it. This is the only parser of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use uuid::Uuid;

use super::late_notifications::LateNotifications;
use crate::deployment::{Deployment, NodeSet};
use crate::fencing::FencingToken;
use crate::guarded::Guarded;
use crate::labels::attempt_id;

/// How long the first node's message waits for those of other nodes, until a majority has sent one.
const MESSAGE_GATHERING: Duration = Duration::from_millis(20);

/// The mailboxes, and the state of the subscriptions.
pub(crate) struct Mailboxes {
    slots: Guarded<HashMap<Uuid, Arc<MailboxSlot>>>,
    pub(super) late_notifications: LateNotifications,
    /// The state of each node's subscription.
    pub(super) states: watch::Sender<Vec<SubscriptionState>>,
    /// The number of nodes that form a majority.
    pub(super) majority: usize,
    /// How many subscriptions were made. It changes only with the states.
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

#[derive(Default)]
struct MailboxSlot {
    /// The latest message, and the nodes that have sent one.
    message: Guarded<(Option<AnnouncedGrant>, NodeSet)>,
    notify: Notify,
}

/// Receives the messages for one id until it is dropped.
pub(crate) struct Mailbox {
    id: Uuid,
    slot: Arc<MailboxSlot>,
    mailboxes: Arc<Mailboxes>,
}

impl Mailbox {
    pub(crate) fn new(mailboxes: &Arc<Mailboxes>, id: Uuid) -> Mailbox {
        let slot = Arc::new(MailboxSlot::default());
        mailboxes.slots.lock().insert(id, Arc::clone(&slot));
        Mailbox { id, slot, mailboxes: Arc::clone(mailboxes) }
    }

    /// Waits for a message: in a quorum, of a majority, or of the nodes that send one soon after
    /// the first. Returns the grant that it announces. `None`: it announces none, or messages may
    /// have been missed, so the waiter must poll.
    ///
    /// # Cancel safety
    /// Cancel safe: a message stays until it is taken.
    pub(crate) async fn wait(&self) -> Option<AnnouncedGrant> {
        // The notification may be left over from an earlier wait that was given up.
        if self.slot.senders() == 0 {
            self.slot.notify.notified().await;
        }
        if self.slot.senders() > 0 {
            let _few = timeout(MESSAGE_GATHERING, async {
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
        self.mailboxes.slots.lock().remove(&self.id);
    }
}

impl Mailboxes {
    pub(super) fn new(deployment: Deployment) -> Mailboxes {
        Mailboxes {
            slots: Guarded::default(),
            late_notifications: LateNotifications::default(),
            states: watch::Sender::new(vec![SubscriptionState::Connecting; deployment.nodes]),
            majority: deployment.majority(),
            made: AtomicU64::new(0),
        }
    }

    /// How many there are: none while no attempt waits.
    pub(crate) fn len(&self) -> usize {
        self.slots.lock().len()
    }

    /// Makes the waiter with this id poll.
    pub(crate) fn notify(&self, id: Uuid) {
        let slot = self.slots.lock().get(&id).cloned();
        // Not under the lock: it runs a waker.
        slot.into_iter().for_each(|slot| slot.notify.notify_one());
    }

    pub(super) fn deliver(&self, place: usize, payload: &[u8]) {
        let Some((attempts, grant)) = parse(payload) else { return };
        for id in attempts {
            let slot = self.slots.lock().get(&id).cloned();
            match slot {
                Some(slot) => {
                    slot.put(place, grant.clone());
                    slot.notify.notify_one();
                }
                None => self.late_notifications.receive(id, place),
            }
        }
    }

    /// Records the state of a node's subscription.
    pub(super) fn set_state(&self, place: usize, state: SubscriptionState) {
        self.states.send_modify(|states| {
            states[place] = state;
            self.made.fetch_add(u64::from(state == SubscriptionState::Subscribed), Ordering::SeqCst);
        });
    }

    /// The number of the latest subscription, if there is one on a majority of nodes.
    pub(super) fn subscription(&self) -> Option<u64> {
        let states = self.states.borrow();
        let count = states.iter().filter(|state| **state == SubscriptionState::Subscribed).count();
        (count >= self.majority).then(|| self.made.load(Ordering::SeqCst))
    }

    /// Makes all waiters poll: messages may have been missed.
    pub(super) fn notify_all(&self) {
        let slots: Vec<_> = self.slots.lock().values().cloned().collect();
        slots.iter().for_each(|slot| slot.notify.notify_one()); // as in `notify`
    }
}

impl MailboxSlot {
    fn put(&self, place: usize, grant: Option<AnnouncedGrant>) {
        let mut message = self.message.lock();
        *message = (grant, message.1.with(place));
    }

    /// Takes the message, and the notification that came with it.
    fn take(&self) -> Option<AnnouncedGrant> {
        let (grant, _) = std::mem::take(&mut *self.message.lock());
        let notified = self.notify.notified();
        tokio::pin!(notified);
        notified.enable();
        grant
    }

    fn senders(&self) -> usize {
        self.message.lock().1.len()
    }
}

/// A grant as its message says: `token time key`. Every user with the right to publish can say
/// that, so it proves nothing by itself.
#[derive(Clone, Debug)]
pub(crate) struct AnnouncedGrant {
    pub(crate) token: u64,
    /// The server's clock, in microseconds.
    pub(crate) time: u64,
    /// The key of the lock.
    pub(crate) key: String,
}

/// The attempts that a message is for, separated by commas, and what it announces to them: without
/// a grant, it only makes them poll. `None`: not ours, since other users may publish in the same
/// channel.
fn parse(payload: &[u8]) -> Option<(impl Iterator<Item = Uuid>, Option<AnnouncedGrant>)> {
    let (attempts, rest) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    // An attempt is its id, followed by the labels of its client.
    Some((attempts.split(',').filter_map(attempt_id), AnnouncedGrant::parse(rest)))
}

impl AnnouncedGrant {
    fn parse(text: &str) -> Option<AnnouncedGrant> {
        let mut words = text.splitn(3, ' ');
        let mut number = || words.next()?.parse().ok().filter(|number| *number < FencingToken::LIMIT);
        let (token, time) = (number()?, number()?);
        let key = words.next()?.to_owned();
        Some(AnnouncedGrant { token, time, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_script_sends_are_no_grant() {
        let id = Uuid::nil().simple();
        let grant = |rest: &str| {
            let text = format!("{id} {rest}");
            parse(text.as_bytes()).and_then(|(_, grant)| grant)
        };
        assert_eq!(grant("7 1800000000000000 lock:a").map(|grant| grant.token), Some(7));
        for rest in ["9007199254740992 1 lock:a", "7 9007199254740992 lock:a", "-1 1 lock:a", "7 lock:a", ""]
        {
            assert!(grant(rest).is_none(), "{rest}");
        }
    }
}
