//! Wake-ups: messages from the server that something changed, on a connection of their own.
//!
//! A wake-up is a hint. All of them may be lost: whoever waits must look for himself now and then.
//! The connection speaks RESP3, where a message is a push and is dispatched as it is read; requests
//! keep the protocol of their URL. It carries nothing else: see the README on connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;

use super::late_notifications::LateNotifications;
use super::subscriber::Subscriber;
use super::{NodeSet, Nodes, WakeupEndpoint};
use crate::labels::attempt_id;

/// How long the first node's message waits for those of others, until more than half have sent one.
const GATHERING: Duration = Duration::from_millis(20);

/// One subscription to one channel on every node, made when it is first needed, kept until this is dropped.
///
/// A message begins with the attempts that it is for, with commas between. An attempt is the id of
/// a mailbox, followed by the labels of the client. The rest of the message is for the waiters.
pub(crate) struct Wakeups {
    channel: Arc<str>,
    /// One for each node.
    wakeup_endpoints: Option<Vec<WakeupEndpoint>>,
    limit: Duration,
    /// What its connections are called in `CLIENT LIST`.
    name: Option<Arc<str>>,
    /// Where requests go, if it was named apart from where to subscribe.
    verified_with: Option<Arc<Nodes>>,
    /// Where the subscribers live: a waiter's runtime may end before the client does.
    runtime: Handle,
    mailboxes: Arc<Mailboxes>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// The mailboxes, and how the subscriptions stand.
#[derive(Debug)]
pub(super) struct Mailboxes {
    slots: Mutex<HashMap<Uuid, Arc<MailboxSlot>>>,
    late_notifications: LateNotifications,
    /// How each node's subscription stands.
    states: watch::Sender<Vec<SubscriptionState>>,
    /// How many it takes.
    majority: usize,
    /// Counts subscriptions made; 0 while there are too few.
    subscription: AtomicU64,
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

impl Wakeups {
    /// To be called on the runtime that the client lives on.
    pub(crate) fn new(
        channel: String,
        wakeup_endpoints: Option<Vec<WakeupEndpoint>>,
        nodes: usize,
        limit: Duration,
    ) -> Wakeups {
        let mailboxes = Mailboxes {
            slots: Mutex::default(),
            late_notifications: LateNotifications::default(),
            states: watch::Sender::new(vec![SubscriptionState::Connecting; nodes]),
            majority: nodes / 2 + 1,
            subscription: AtomicU64::new(0),
            made: AtomicU64::new(0),
        };
        Wakeups {
            channel: channel.into(),
            wakeup_endpoints,
            limit,
            name: None,
            verified_with: None,
            runtime: Handle::current(),
            mailboxes: Arc::new(mailboxes),
            tasks: Mutex::default(),
        }
    }

    pub(crate) fn channel(&self) -> &Arc<str> {
        &self.channel
    }

    /// Its connections are called so in `CLIENT LIST`.
    pub(crate) fn named(mut self, name: Option<String>) -> Wakeups {
        self.name = name.map(Arc::from);
        self
    }

    /// Where it subscribes, what is published through these nodes must be heard, before it counts
    /// as subscribed.
    pub(crate) fn verified_with(mut self, nodes: Arc<Nodes>) -> Wakeups {
        self.verified_with = Some(nodes);
        self
    }

    /// Whether it subscribes at a place that was named apart.
    pub(crate) fn is_to_be_verified(&self) -> bool {
        self.verified_with.is_some() && self.wakeup_endpoints.is_some()
    }

    /// Where it subscribes, if requests were found to go elsewhere.
    pub(crate) fn elsewhere(&self) -> Option<String> {
        let states = self.mailboxes.states.borrow();
        let place = states.iter().position(|state| *state == SubscriptionState::Elsewhere)?;
        self.wakeup_endpoints.as_ref()?.get(place).map(WakeupEndpoint::label)
    }

    /// Which subscription stands, if one does: on more than half of the nodes.
    pub(crate) fn subscription(&self) -> Option<u64> {
        match self.mailboxes.subscription.load(Ordering::SeqCst) {
            0 => None,
            number => Some(number),
        }
    }

    /// Subscribes, if that was not begun, and waits until it is done or has failed, for `patience` at most.
    /// False: poll.
    pub(crate) async fn start(&self, patience: Duration) -> bool {
        let Some(wakeup_endpoints) = &self.wakeup_endpoints else { return false };
        {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            if tasks.is_empty() {
                for (place, endpoint) in wakeup_endpoints.iter().enumerate() {
                    let subscriber = Subscriber {
                        endpoint: endpoint.clone(),
                        place,
                        channel: Arc::clone(&self.channel),
                        limit: self.limit,
                        name: self.name.clone(),
                        mailboxes: Arc::clone(&self.mailboxes),
                    };
                    let verified_with = self.verified_with.clone();
                    tasks.push(self.runtime.spawn(subscriber.run(verified_with)));
                }
            }
        }
        let mut states = self.mailboxes.states.subscribe();
        let standing =
            |states: &Vec<SubscriptionState>, state| states.iter().filter(|it| **it == state).count();
        let majority = self.mailboxes.majority;
        let settled = timeout(
            patience,
            states.wait_for(|states| {
                standing(states, SubscriptionState::Subscribed) >= majority
                    || states.len()
                        - standing(states, SubscriptionState::Failed)
                        - standing(states, SubscriptionState::Elsewhere)
                        < majority
            }),
        )
        .await;
        matches!(settled, Ok(Ok(states)) if standing(&states, SubscriptionState::Subscribed) >= majority)
    }

    /// A mailbox for the messages that begin with this id.
    pub(crate) fn mailbox(&self, id: Uuid) -> Mailbox {
        Mailbox::new(&self.mailboxes, id)
    }

    /// What to do about a message from a node that still comes for this id, for as long as one may.
    pub(crate) fn expect_late_notifications(&self, id: Uuid, answer: impl Fn(usize) + Send + 'static) {
        self.mailboxes.late_notifications.expect(id, Box::new(answer));
    }

    /// How many mailboxes there are: none once nobody waits.
    pub(crate) fn mailbox_count(&self) -> usize {
        self.mailboxes.slots().len()
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        for task in self.tasks.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
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
    /// Poisoning does not matter: nothing under this lock panics.
    fn slots(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<MailboxSlot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deliver(&self, place: usize, payload: &[u8]) {
        let Some((attempts, rest)) = std::str::from_utf8(payload).ok().and_then(|text| text.split_once(' '))
        else {
            return; // not one of ours: anybody may publish
        };
        let slots = self.slots();
        for id in attempts.split(',').filter_map(attempt_id) {
            match slots.get(&id) {
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
