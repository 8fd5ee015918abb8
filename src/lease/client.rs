//! [`Client`]: what all locks of one application share.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use super::keeper::Keeper;
use super::shared::Holds;
use super::turnstile::Turnstiles;
use crate::error::{ConfigError, Error, NodeError};
use crate::options::{Options, RestartGuard};
use crate::wire::{Dial, Ear, Node, Nodes, Roster, Wakeups};

/// The nodes, one keeper, one channel for wake-ups, and the queues inside this process.
pub(crate) struct Client {
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) wakeups: Wakeups,
    pub(super) keeper: Arc<Keeper>,
    pub(super) turnstiles: Turnstiles,
    pub(super) holds: Holds,
}

impl Client {
    /// Connects to one deployment, and starts the keeper on the runtime that this is called from.
    pub(crate) async fn start(dial: Dial, ear: Option<Ear>, options: &Options) -> Result<Arc<Client>, Error> {
        let label = dial.label();
        let node = Node::new(dial, options.node_timeout, options.wants_replicas().is_some(), None);
        let nodes = Nodes::new(vec![(node, label)]);
        for outcome in nodes.connect().await {
            outcome.map_err(|cause| Error::Redis { script: "connect", cause })?;
        }
        Ok(Client::with(nodes, ear.map(|ear| vec![ear]), options))
    }

    /// Connects to several servers, each with a name for people: to more than half of them, and to none that must
    /// not be among them.
    pub(crate) async fn start_quorum(
        servers: Vec<(redis::Client, String)>,
        options: &Options,
    ) -> Result<Arc<Client>, Error> {
        let labels: Vec<String> = servers.iter().map(|(_, label)| label.clone()).collect();
        let strict = options.restart_guard == RestartGuard::On;
        let roster = Arc::new(Roster::new(labels.clone(), strict));
        let ears = servers.iter().map(|(server, _)| Ear::Server(server.clone())).collect();
        let nodes = servers.into_iter().enumerate().map(|(place, (server, label))| {
            let place = Some((place, Arc::clone(&roster)));
            let confirms = options.wants_replicas().is_some();
            (Node::new(Dial::Server(server), options.node_timeout, confirms, place), label)
        });
        let nodes = Nodes::new(nodes.collect());
        let mut failed = Vec::new();
        for (place, outcome) in nodes.connect().await.into_iter().enumerate() {
            if let Some(problem) = roster.problem(place) {
                return Err(ConfigError::Node { node: labels[place].clone(), problem }.into());
            }
            if let Err(cause) = outcome {
                let error = Error::Redis { script: "connect", cause };
                failed.push(NodeError { node: labels[place].clone(), error });
            }
        }
        let (of, answered) = (nodes.count(), nodes.count() - failed.len());
        if answered < nodes.majority() {
            return Err(Error::NoQuorum { script: "connect", of, answered, nodes: failed });
        }
        Ok(Client::with(nodes, Some(ears), options))
    }

    fn with(nodes: Nodes, ears: Option<Vec<Ear>>, options: &Options) -> Arc<Client> {
        let nodes = Arc::new(nodes);
        // Of a cluster, PUBLISH counts only those who listen to the same server: scripts know by the name.
        let elsewhere = if nodes.resend() { "~" } else { "" };
        // A waiter is written as words with blanks between.
        let prefix = options.prefix.replace(char::is_whitespace, "_");
        let channel = format!("{prefix}wake:{}{elsewhere}", Uuid::new_v4().simple());
        let ears = ears.filter(|_| options.wakeups == crate::options::Wakeups::Push);
        Arc::new(Client {
            keeper: Keeper::start(Arc::clone(&nodes)),
            wakeups: Wakeups::new(channel, ears, nodes.count(), options.node_timeout),
            turnstiles: Turnstiles::default(),
            holds: Holds::default(),
            nodes,
        })
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
