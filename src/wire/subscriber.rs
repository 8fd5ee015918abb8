//! [`Subscriber`]: one subscription, made again whenever it ends.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, ErrorKind, ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::error_replies::too_slow;
use super::mailboxes::{Mailbox, Mailboxes, SubscriptionState};
use super::nodes::Nodes;
use super::servers::{Endpoint, config, connect, set_name};
use crate::traces::event;

/// How often a silent subscription is checked with a PING.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The first and the longest pause between attempts to subscribe again.
const SUBSCRIBE_PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// What a subscription needs.
pub(super) struct Subscriber {
    pub(super) endpoint: Endpoint,
    pub(super) place: usize,
    pub(super) channel: Arc<str>,
    pub(super) limit: Duration,
    /// The connections' name in `CLIENT LIST`.
    pub(super) name: Option<Arc<str>>,
    pub(super) mailboxes: Arc<Mailboxes>,
}

impl Subscriber {
    /// Subscribes, and again whenever the subscription ends.
    pub(super) async fn run(self, mut verified_with: Option<Arc<Nodes>>) {
        let mut pause = SUBSCRIBE_PAUSES.0;
        let mut has_failed = false;
        loop {
            match self.subscribe(verified_with.as_deref()).await {
                Ok(subscription) => {
                    if std::mem::take(&mut has_failed) {
                        event!(
                            info, server = %self.endpoint.label(), "subscribed to wake-ups again"
                        );
                    }
                    // One verification suffices: the configured place is the same server. A
                    // subscription that is made again must not depend on the connection for
                    // requests.
                    verified_with = None;
                    pause = SUBSCRIBE_PAUSES.0;
                    self.mailboxes.set_state(self.place, SubscriptionState::Subscribed);
                    self.mailboxes.notify_all();
                    subscription.until_lost().await;
                    self.mailboxes.set_state(self.place, SubscriptionState::Connecting);
                }
                Err((state, _error)) => {
                    // One WARN per outage, however many attempts fail.
                    if !std::mem::replace(&mut has_failed, true) {
                        event!(
                            warn,
                            server = %self.endpoint.label(),
                            error = %_error,
                            "cannot subscribe to wake-ups: its waiters poll; on a quorum, only if most nodes fail so"
                        );
                    }
                    self.mailboxes.set_state(self.place, state);
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(SUBSCRIBE_PAUSES.1);
        }
    }

    /// Subscribes, and verifies that the subscription receives what these nodes publish.
    async fn subscribe(
        &self,
        verified_with: Option<&Nodes>,
    ) -> Result<Subscription, (SubscriptionState, RedisError)> {
        let opened = timeout(self.limit, self.open()).await.unwrap_or_else(|_| Err(too_slow()));
        let mut subscription = opened.map_err(|error| (SubscriptionState::Failed, error))?;
        let decides_alone = |nodes: &&Nodes| nodes.deployment.decides_alone();
        let Some(node) = verified_with.filter(decides_alone).map(|nodes| nodes.node(0)) else {
            return Ok(subscription);
        };
        let id = Uuid::new_v4();
        let mailbox = Mailbox::new(&self.mailboxes, id);
        let another = || {
            let text = "the subscription receives no message of the server that requests go to: it is another server";
            (SubscriptionState::Elsewhere, RedisError::from((ErrorKind::InvalidClientConfig, text)))
        };
        match node.publish(&self.channel, &format!("{} verify", id.simple())).await {
            // Without the right to publish, scripts publish nothing, and waiters poll.
            Ok(None) => return Ok(subscription),
            // A subscriber of a replica receives what a client publishes at its master, but not
            // what scripts publish, so the subscriber count decides. In a cluster any server
            // receives it, and the count is that of one server.
            Ok(Some(0)) if !node.is_cluster() => {
                // The message is missing, or the subscription has broken meanwhile.
                let is_there = subscription.is_alive().await;
                return Err(if is_there { another() } else { (SubscriptionState::Failed, too_slow()) });
            }
            Ok(Some(_)) => {}
            Err(error) => return Err((SubscriptionState::Failed, error)),
        }
        tokio::select! {
            received = timeout(self.limit, mailbox.wait()) => match received {
                Ok(_) => Ok(subscription),
                Err(_) => Err(another()),
            },
            () = subscription.disconnected.notified() => Err((SubscriptionState::Failed, too_slow())),
        }
    }

    /// Connects and subscribes. Messages go to `mailboxes`.
    async fn open(&self) -> Result<Subscription, RedisError> {
        let place_of_requests = self.endpoint.place();
        let found = self.endpoint.client().await?;
        let info = found.get_connection_info().clone();
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let client = Client::open(info.set_redis_settings(settings))?;
        let disconnected = Arc::new(Notify::new());
        let (mailboxes, notified, place) =
            (Arc::clone(&self.mailboxes), Arc::clone(&disconnected), self.place);
        let on_push = move |push: PushInfo| -> Result<(), std::convert::Infallible> {
            match (push.kind, push.data.as_slice()) {
                (PushKind::Message, [_, Value::BulkString(payload)]) => mailboxes.deliver(place, payload),
                (PushKind::Disconnection | PushKind::Unsubscribe, _) => notified.notify_one(),
                _ => {}
            }
            Ok(())
        };
        let config = config(self.limit).set_push_sender(on_push);
        let mut connection = connect(&client, &config).await?;
        if let Some(name) = &self.name {
            set_name(name, async |naming| naming.query_async(&mut connection).await).await?;
        }
        self.endpoint.check(&found, &mut connection).await?;
        connection.subscribe(&*self.channel).await?;
        Ok(Subscription {
            endpoint: self.endpoint.clone(),
            found,
            connection,
            disconnected,
            place_of_requests,
        })
    }
}

struct Subscription {
    endpoint: Endpoint,
    /// The server.
    found: Client,
    connection: MultiplexedConnection,
    /// Notified when the connection breaks.
    disconnected: Arc<Notify>,
    place_of_requests: Option<watch::Receiver<Option<ConnectionAddr>>>,
}

impl Subscription {
    async fn is_alive(&mut self) -> bool {
        self.endpoint.check(&self.found, &mut self.connection).await.is_ok()
    }

    /// Returns once the subscription has broken, does not reply, or should move to another server.
    async fn until_lost(mut self) {
        let here = self.found.get_connection_info().addr().clone();
        let moves = moves_from(here, self.place_of_requests.take());
        tokio::pin!(moves);
        loop {
            tokio::select! {
                () = self.disconnected.notified() => return,
                () = &mut moves => return,
                () = sleep(HEARTBEAT) => {
                    if !self.is_alive().await {
                        return;
                    }
                }
            }
        }
    }
}

/// Returns once requests are sent elsewhere than before, and not to this server. Only a change
/// counts: if two sentinels disagree, connections are not moved back and forth.
async fn moves_from(here: ConnectionAddr, place: Option<watch::Receiver<Option<ConnectionAddr>>>) {
    if let Some(mut place) = place {
        while place.changed().await.is_ok() {
            if place.borrow().as_ref() != Some(&here) {
                return;
            }
        }
    }
    std::future::pending().await
}
