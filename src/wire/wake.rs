//! Wake-ups: messages from the server that something changed, on a connection of their own.
//!
//! A wake-up is a hint. All of them may be lost: whoever waits must look for himself now and then.
//! The connection speaks RESP3, where a message is a push and is dispatched as it is read; requests
//! keep the protocol of their URL. It carries nothing else: see the README on connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::connection::too_slow;
use super::dial::connect;
use super::settings::config;
use super::strays::Strays;
use super::{Ear, NodeSet};

/// How often a silent subscription is asked whether it still stands.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The pauses between tries to subscribe again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// How long the first node's message waits for those of others, until more than half have sent one.
const GATHERING: Duration = Duration::from_millis(20);

/// One subscription to one channel on every node, made when it is first needed, kept until this is dropped.
///
/// A message begins with the ids of the mailboxes that it is for, with commas between; the rest is for whom
/// they belong to.
#[derive(Debug)]
pub(crate) struct Wakeups {
    channel: Arc<str>,
    /// One for each node.
    ears: OnceLock<Vec<Ear>>,
    limit: Duration,
    /// Where the subscribers live: a waiter's runtime may end before the client does.
    runtime: Handle,
    post: Arc<Post>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Post {
    boxes: Mutex<HashMap<Uuid, Arc<Slot>>>,
    strays: Strays,
    /// How each node's subscription stands.
    states: watch::Sender<Vec<State>>,
    /// How many it takes.
    majority: usize,
    /// Counts subscriptions made; 0 while there are too few.
    subscription: AtomicU64,
    made: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Subscribed,
    Failed,
}

#[derive(Debug, Default)]
struct Slot {
    message: Mutex<Option<(String, NodeSet)>>,
    bell: Notify,
}

impl Wakeups {
    /// To be called on the runtime that the client lives on.
    pub(crate) fn new(channel: String, ears: Option<Vec<Ear>>, nodes: usize, limit: Duration) -> Wakeups {
        let post = Post {
            boxes: Mutex::default(),
            strays: Strays::default(),
            states: watch::Sender::new(vec![State::Connecting; nodes]),
            majority: nodes / 2 + 1,
            subscription: AtomicU64::new(0),
            made: AtomicU64::new(0),
        };
        Wakeups {
            channel: channel.into(),
            ears: ears.map(OnceLock::from).unwrap_or_default(),
            limit,
            runtime: Handle::current(),
            post: Arc::new(post),
            tasks: Mutex::default(),
        }
    }

    pub(crate) fn channel(&self) -> &Arc<str> {
        &self.channel
    }

    /// A way to subscribe for one who had none. False if there is one already.
    pub(crate) fn subscribe_with(&self, ear: Ear) -> bool {
        self.ears.set(vec![ear]).is_ok()
    }

    /// Which subscription stands, if one does: on more than half of the nodes.
    pub(crate) fn subscription(&self) -> Option<u64> {
        match self.post.subscription.load(Ordering::SeqCst) {
            0 => None,
            number => Some(number),
        }
    }

    /// Subscribes, if that was not begun, and waits until it is done or has failed, for `patience` at most.
    /// False: poll.
    pub(crate) async fn start(&self, patience: Duration) -> bool {
        let Some(ears) = self.ears.get() else { return false };
        {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            if tasks.is_empty() {
                for (place, ear) in ears.iter().enumerate() {
                    let (ear, post) = (ear.clone(), Arc::clone(&self.post));
                    let subscribing = subscribe(ear, place, Arc::clone(&self.channel), self.limit, post);
                    tasks.push(self.runtime.spawn(subscribing));
                }
            }
        }
        let mut states = self.post.states.subscribe();
        let standing = |states: &Vec<State>, state| states.iter().filter(|it| **it == state).count();
        let majority = self.post.majority;
        let settled = timeout(
            patience,
            states.wait_for(|states| {
                standing(states, State::Subscribed) >= majority
                    || states.len() - standing(states, State::Failed) < majority
            }),
        )
        .await;
        matches!(settled, Ok(Ok(states)) if standing(&states, State::Subscribed) >= majority)
    }

    /// A mailbox for the messages that begin with this id.
    pub(crate) fn mailbox(&self, id: Uuid) -> Mailbox {
        let slot = Arc::new(Slot::default());
        self.post.boxes().insert(id, Arc::clone(&slot));
        Mailbox { id, slot, post: Arc::clone(&self.post) }
    }

    /// What to do about a message from a node that still comes for this id, for as long as one may.
    pub(crate) fn expect_stray(&self, id: Uuid, answer: impl Fn(usize) + Send + 'static) {
        self.post.strays.expect(id, Box::new(answer));
    }

    /// How many mailboxes there are: none once nobody waits.
    pub(crate) fn mailboxes(&self) -> usize {
        self.post.boxes().len()
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
    slot: Arc<Slot>,
    post: Arc<Post>,
}

impl Mailbox {
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
                while self.slot.senders() < self.post.majority {
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
        self.post.boxes().remove(&self.id);
    }
}

impl Post {
    /// Poisoning does not matter: nothing under this lock panics.
    fn boxes(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Slot>>> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, place: usize, payload: &[u8]) {
        let Some((ids, rest)) = std::str::from_utf8(payload).ok().and_then(|text| text.split_once(' '))
        else {
            return; // not one of ours: anybody may publish
        };
        let boxes = self.boxes();
        for id in ids.split(',').filter_map(|id| Uuid::try_parse(id).ok()) {
            match boxes.get(&id) {
                Some(slot) => {
                    slot.put(place, rest);
                    slot.bell.notify_one();
                }
                None => self.strays.hear(id, place),
            }
        }
    }

    fn set(&self, place: usize, state: State) {
        self.states.send_modify(|states| {
            states[place] = state;
            let standing = states.iter().filter(|state| **state == State::Subscribed).count();
            let number = if standing >= self.majority { self.made.load(Ordering::SeqCst) } else { 0 };
            self.subscription.store(number, Ordering::SeqCst);
        });
    }

    fn ring_all(&self) {
        for slot in self.boxes().values() {
            slot.bell.notify_one();
        }
    }
}

impl Slot {
    fn put(&self, place: usize, message: &str) {
        let mut slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        let senders = slot.take().map_or(NodeSet::of([]), |(_, senders)| senders);
        *slot = Some((message.to_owned(), senders.with(place)));
    }

    /// The message, and the ring that came with it.
    fn take(&self) -> Option<String> {
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner).take();
        let rung = self.bell.notified();
        tokio::pin!(rung);
        rung.enable();
        message.map(|(message, _)| message)
    }

    fn senders(&self) -> usize {
        let slot = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map_or(0, |(_, senders)| senders.len())
    }
}

async fn subscribe(ear: Ear, place: usize, channel: Arc<str>, limit: Duration, post: Arc<Post>) {
    let mut pause = PAUSES.0;
    let mut failed = false;
    loop {
        let gone = Arc::new(Notify::new());
        match timeout(limit, open(&ear, place, &channel, limit, &post, &gone))
            .await
            .unwrap_or_else(|_| Err(too_slow()))
        {
            Ok((client, connection)) => {
                if std::mem::take(&mut failed) {
                    crate::event::event!(info, node = %ear.label(), "subscribed to wake-ups again");
                }
                pause = PAUSES.0;
                post.made.fetch_add(1, Ordering::SeqCst);
                post.set(place, State::Subscribed);
                post.ring_all();
                stands(&ear, &client, connection, &gone).await;
                post.set(place, State::Connecting);
            }
            Err(_error) => {
                // Once for an outage, however often it is tried.
                if !std::mem::replace(&mut failed, true) {
                    crate::event::event!(
                        warn,
                        node = %ear.label(),
                        error = %_error,
                        "cannot subscribe to wake-ups of this node: who waits for it looks now and then"
                    );
                }
                post.set(place, State::Failed);
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Connects and subscribes. Messages go to `post`; `gone` is told when the connection breaks.
async fn open(
    ear: &Ear,
    place: usize,
    channel: &str,
    limit: Duration,
    post: &Arc<Post>,
    gone: &Arc<Notify>,
) -> Result<(Client, MultiplexedConnection), RedisError> {
    let found = ear.client().await?;
    let info = found.get_connection_info().clone();
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let client = Client::open(info.set_redis_settings(settings))?;
    let (post, gone) = (Arc::clone(post), Arc::clone(gone));
    let on_push = move |push: PushInfo| -> Result<(), std::convert::Infallible> {
        match (push.kind, push.data.as_slice()) {
            (PushKind::Message, [_, Value::BulkString(payload)]) => post.deliver(place, payload),
            (PushKind::Disconnection | PushKind::Unsubscribe, _) => gone.notify_one(),
            _ => {}
        }
        Ok(())
    };
    let config = config(limit).set_push_sender(on_push);
    let mut connection = connect(&client, &config).await?;
    ear.connected(&found, &mut connection).await;
    connection.subscribe(channel).await?;
    Ok((found, connection))
}

/// Returns once the subscription does not stand any more, is silent when asked, or would better be elsewhere.
async fn stands(ear: &Ear, client: &Client, mut connection: MultiplexedConnection, gone: &Notify) {
    let moves = ear.moves_from(client);
    tokio::pin!(moves);
    loop {
        tokio::select! {
            () = gone.notified() => return,
            () = &mut moves => return,
            () = sleep(HEARTBEAT) => {
                if redis::cmd("PING").query_async::<Value>(&mut connection).await.is_err() {
                    return;
                }
            }
        }
    }
}
