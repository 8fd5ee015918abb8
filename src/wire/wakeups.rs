//! Wake-ups: messages that name the attempts to which a script has granted a lock, on a connection
//! of their own. On one server, a message may grant the lease; elsewhere it makes its waiter poll.
//! Any message may be lost, so every waiter also polls now and then.
//!
//! The connection speaks RESP3, where a message is a push and is dispatched as it is read; requests
//! keep the protocol of their URL. It carries no other traffic: see the page on connecting.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::timeout;
use uuid::Uuid;

use super::mailboxes::{Mailboxes, SubscriptionState};
use super::nodes::Nodes;
use super::servers::Endpoint;
use super::subscriber::Subscriber;
use crate::deployment::Deployment;
use crate::guarded::Guarded;

/// One subscription to one channel on every node, made when it is first needed and kept until this
/// is dropped.
///
/// The id of an attempt is that of its mailbox.
pub(crate) struct WakeupSubscription {
    pub(crate) channel: Arc<str>,
    /// One for each node.
    wakeup_endpoints: Option<Vec<Endpoint>>,
    limit: Duration,
    /// The connections' name in `CLIENT LIST`.
    name: Option<Arc<str>>,
    /// The nodes that requests go to, if the place to subscribe was configured separately.
    verified_with: Option<Arc<Nodes>>,
    /// The runtime of the subscribers: a waiter's runtime may end before the client does.
    runtime: Handle,
    pub(crate) mailboxes: Arc<Mailboxes>,
    /// Aborted when this is dropped.
    tasks: Guarded<JoinSet<()>>,
}

impl WakeupSubscription {
    /// Must be called on the client's runtime. `name` is set in `CLIENT LIST`.
    ///
    /// With `verified_with`, on one node, the first subscription counts only after it has received
    /// a message that was published through these nodes, unless the user may not publish.
    pub(crate) fn new(
        channel: String,
        wakeup_endpoints: Option<Vec<Endpoint>>,
        deployment: Deployment,
        limit: Duration,
        name: Option<String>,
        verified_with: Option<Arc<Nodes>>,
    ) -> WakeupSubscription {
        WakeupSubscription {
            channel: channel.into(),
            wakeup_endpoints,
            limit,
            name: name.map(Arc::from),
            verified_with,
            runtime: Handle::current(),
            mailboxes: Arc::new(Mailboxes::new(deployment)),
            tasks: Guarded::default(),
        }
    }

    /// Whether the place to subscribe was configured separately.
    pub(crate) fn is_to_be_verified(&self) -> bool {
        self.verified_with.is_some() && self.wakeup_endpoints.is_some()
    }

    /// Where the subscription leads, if requests turned out to go elsewhere.
    pub(crate) fn elsewhere(&self) -> Option<String> {
        let states = self.mailboxes.states.borrow();
        let place = states.iter().position(|state| *state == SubscriptionState::Elsewhere)?;
        self.wakeup_endpoints.as_ref()?.get(place).map(Endpoint::label)
    }

    /// The number of the present subscription, if there is one on a majority of nodes.
    pub(crate) fn subscription(&self) -> Option<u64> {
        self.mailboxes.subscription()
    }

    /// Subscribes, unless that was begun before, and waits at most `limit` until it has
    /// succeeded or failed. False: the waiter must poll.
    pub(crate) async fn start(&self, limit: Duration) -> bool {
        let Some(wakeup_endpoints) = &self.wakeup_endpoints else { return false };
        {
            let mut tasks = self.tasks.lock();
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
                    tasks.spawn_on(subscriber.run(verified_with), &self.runtime);
                }
            }
        }
        let mut states = self.mailboxes.states.subscribe();
        let majority = self.mailboxes.majority;
        let is_settled = |states: &Vec<SubscriptionState>| {
            let count = |state| states.iter().filter(|other| **other == state).count();
            let subscribed = count(SubscriptionState::Subscribed);
            subscribed >= majority || subscribed + count(SubscriptionState::Connecting) < majority
        };
        drop(timeout(limit, states.wait_for(is_settled)).await);
        self.subscription().is_some()
    }

    /// Sets the action for messages that still arrive for this id, for as long as one may.
    pub(crate) fn expect_late_notifications(&self, id: Uuid, answer: impl Fn(usize) + Send + Sync + 'static) {
        self.mailboxes.late_notifications.expect(id, Arc::new(answer));
    }
}
