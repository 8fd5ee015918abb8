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

use super::crowd::too_slow;
use super::link::config;

/// How often a silent subscription is asked whether it still stands.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The pauses between tries to subscribe again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// One subscription to one channel, made when it is first needed, kept until this is dropped.
///
/// A message begins with the ids of the mailboxes that it is for, with commas between; the rest is for whom
/// they belong to.
#[derive(Debug)]
pub(crate) struct Wakeups {
    channel: String,
    client: OnceLock<Client>,
    limit: Duration,
    /// Where the subscriber lives: a waiter's runtime may end before the client does.
    runtime: Handle,
    post: Arc<Post>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Post {
    boxes: Mutex<HashMap<Uuid, Arc<Slot>>>,
    state: watch::Sender<State>,
    /// Counts subscriptions made; 0 while there is none.
    subscription: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Subscribed,
    Failed,
}

#[derive(Debug, Default)]
struct Slot {
    message: Mutex<Option<String>>,
    bell: Notify,
}

impl Wakeups {
    /// To be called on the runtime that the client lives on.
    pub(crate) fn new(channel: String, client: Option<Client>, limit: Duration) -> Wakeups {
        let post = Post {
            boxes: Mutex::default(),
            state: watch::Sender::new(State::Connecting),
            subscription: AtomicU64::new(0),
        };
        Wakeups {
            channel,
            client: client.map(OnceLock::from).unwrap_or_default(),
            limit,
            runtime: Handle::current(),
            post: Arc::new(post),
            task: Mutex::new(None),
        }
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// A way to subscribe for one who had none. False if there is one already.
    pub(crate) fn subscribe_with(&self, client: Client) -> bool {
        self.client.set(client).is_ok()
    }

    /// Which subscription stands, if one does.
    pub(crate) fn subscription(&self) -> Option<u64> {
        match self.post.subscription.load(Ordering::SeqCst) {
            0 => None,
            number => Some(number),
        }
    }

    /// Subscribes, if that was not begun, and waits until it is done or has failed, for `patience` at most.
    /// False: poll.
    pub(crate) async fn start(&self, patience: Duration) -> bool {
        let Some(client) = self.client.get() else { return false };
        {
            let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
            if task.is_none() {
                let (client, post) = (client.clone(), Arc::clone(&self.post));
                *task = Some(self.runtime.spawn(subscribe(client, self.channel.clone(), self.limit, post)));
            }
        }
        let mut state = self.post.state.subscribe();
        let settled = timeout(patience, state.wait_for(|state| *state != State::Connecting)).await;
        matches!(settled, Ok(Ok(state)) if *state == State::Subscribed)
    }

    /// A mailbox for the messages that begin with this id.
    pub(crate) fn mailbox(&self, id: Uuid) -> Mailbox {
        let slot = Arc::new(Slot::default());
        self.post.boxes().insert(id, Arc::clone(&slot));
        Mailbox { id, slot, post: Arc::clone(&self.post) }
    }

    /// How many mailboxes there are: none once nobody waits.
    pub(crate) fn mailboxes(&self) -> usize {
        self.post.boxes().len()
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
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
    /// Waits for a message. `None`: messages may have been missed, so go and look.
    ///
    /// # Cancel safety
    /// A message stays until it is taken.
    pub(crate) async fn wait(&self) -> Option<String> {
        self.slot.bell.notified().await;
        self.slot.message.lock().unwrap_or_else(PoisonError::into_inner).take()
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

    fn deliver(&self, payload: &[u8]) {
        let Some((ids, rest)) = std::str::from_utf8(payload).ok().and_then(|text| text.split_once(' '))
        else {
            return; // not one of ours: anybody may publish
        };
        let boxes = self.boxes();
        for id in ids.split(',') {
            if let Some(slot) = Uuid::try_parse(id).ok().and_then(|id| boxes.get(&id)) {
                *slot.message.lock().unwrap_or_else(PoisonError::into_inner) = Some(rest.to_owned());
                slot.bell.notify_one();
            }
        }
    }

    fn ring_all(&self) {
        for slot in self.boxes().values() {
            slot.bell.notify_one();
        }
    }
}

async fn subscribe(client: Client, channel: String, limit: Duration, post: Arc<Post>) {
    let mut subscriptions = 0;
    let mut pause = PAUSES.0;
    loop {
        let gone = Arc::new(Notify::new());
        match timeout(limit, open(&client, &channel, limit, &post, &gone))
            .await
            .unwrap_or_else(|_| Err(too_slow()))
        {
            Ok(connection) => {
                subscriptions += 1;
                pause = PAUSES.0;
                post.subscription.store(subscriptions, Ordering::SeqCst);
                post.state.send_replace(State::Subscribed);
                post.ring_all();
                stands(connection, &gone).await;
                post.subscription.store(0, Ordering::SeqCst);
                post.state.send_replace(State::Connecting);
            }
            Err(_error) => {
                crate::event::event!(warn, error = %_error, "cannot subscribe to wake-ups: waiters poll");
                post.state.send_replace(State::Failed);
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Connects and subscribes. Messages go to `post`; `gone` is told when the connection breaks.
async fn open(
    client: &Client,
    channel: &str,
    limit: Duration,
    post: &Arc<Post>,
    gone: &Arc<Notify>,
) -> Result<MultiplexedConnection, RedisError> {
    let info = client.get_connection_info().clone();
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let client = Client::open(info.set_redis_settings(settings))?;
    let (post, gone) = (Arc::clone(post), Arc::clone(gone));
    let on_push = move |push: PushInfo| -> Result<(), std::convert::Infallible> {
        match (push.kind, push.data.as_slice()) {
            (PushKind::Message, [_, Value::BulkString(payload)]) => post.deliver(payload),
            (PushKind::Disconnection | PushKind::Unsubscribe, _) => gone.notify_one(),
            _ => {}
        }
        Ok(())
    };
    let config = config(limit).set_push_sender(on_push);
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    connection.subscribe(channel).await?;
    Ok(connection)
}

/// Returns once the subscription does not stand any more, or is silent when asked.
async fn stands(mut connection: MultiplexedConnection, gone: &Notify) {
    loop {
        tokio::select! {
            () = gone.notified() => return,
            () = sleep(HEARTBEAT) => {
                if redis::cmd("PING").query_async::<Value>(&mut connection).await.is_err() {
                    return;
                }
            }
        }
    }
}
