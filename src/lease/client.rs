//! [`Client`]: what all locks of one application share.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use super::keeper::Keeper;
use super::shared::Holds;
use super::turnstile::Turnstiles;
use crate::error::Error;
use crate::options::Options;
use crate::wire::{Dial, Node, Wakeups};

/// One node, one keeper, one channel for wake-ups, and the queues inside this process.
pub(crate) struct Client {
    pub(crate) node: Arc<Node>,
    pub(crate) wakeups: Wakeups,
    pub(super) keeper: Arc<Keeper>,
    pub(super) turnstiles: Turnstiles,
    pub(super) holds: Holds,
}

impl Client {
    /// Connects, and starts the keeper on the runtime that this is called from.
    pub(crate) async fn start(
        dial: Dial,
        subscriber: Option<redis::Client>,
        options: &Options,
    ) -> Result<Arc<Client>, Error> {
        let limit = options.node_timeout;
        let node = Arc::new(Node::new(dial, limit));
        node.connect().await.map_err(|source| Error::Redis { script: "connect", source })?;
        let channel = format!("{}wake:{}", options.prefix, Uuid::new_v4().simple());
        Ok(Arc::new(Client {
            keeper: Keeper::start(Arc::clone(&node)),
            wakeups: Wakeups::new(channel, subscriber, limit),
            turnstiles: Turnstiles::default(),
            holds: Holds::default(),
            node,
        }))
    }
}

impl Client {
    /// Waits until everything that was dropped has been given back.
    pub(crate) async fn settled(&self) {
        self.keeper.settled().await;
    }
}

/// What it is busy with: all zero once nothing is held, waited for or given back.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("kept", &self.keeper.entries())
            .field("waiting", &self.wakeups.mailboxes())
            .field("queues", &self.turnstiles.entries())
            .field("shared", &self.holds.entries())
            .finish()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.keeper.close();
    }
}
