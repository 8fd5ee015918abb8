//! The network between clients and real servers, in memory: it delivers one item at a time, when
//! the test asks for it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::connection::{CAPACITY, Connection};
use super::server::Server;
use redlatch::simulation::{PendingConnection, pending_connections, stay_in_memory};

/// The shortest sleep. With a paused clock, a sleep ends once every task of the runtime is idle.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// How long any operation may take here; a lease is valid for many times that.
const SOON: Duration = Duration::from_secs(6);

/// The owner of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionOwner {
    /// The client whose futures are dropped.
    Subject,
    /// The client that holds the lock before, or checks what is left.
    Rival,
}

/// What is delivered first, of several requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// All requests are delivered before any reply.
    RequestsFirst,
    AnswersFirst,
    /// Like `RequestsFirst`, but one item of every connection at a time: the replies of all nodes
    /// arrive together.
    Together,
}

/// How a node fails for the subject, while the rival reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outage {
    /// Nothing is delivered.
    Silent,
    /// Connections break, and new ones are refused.
    Refuses,
}

/// All nodes, where one node's index is expected.
pub(super) const ALL: usize = usize::MAX;

pub(super) struct Network {
    pub(super) servers: Vec<Server>,
    connections: RefCell<Vec<Connection>>,
    pending: RefCell<Vec<PendingConnection>>,
    order: Order,
    /// The node that fails for the subject, or [`ALL`].
    outage: Cell<Option<(usize, Outage)>>,
    /// What was in flight for the subject, at any point.
    recorded: RefCell<BTreeSet<String>>,
}

impl ConnectionOwner {
    fn word(self) -> &'static str {
        match self {
            ConnectionOwner::Subject => "subject",
            ConnectionOwner::Rival => "rival",
        }
    }

    fn has(self, address: &str) -> bool {
        address.starts_with(self.word())
    }
}

impl Network {
    /// Creates the network before these servers. From now on, the thread connects to nothing else.
    pub(super) fn before(servers: Vec<Server>, order: Order) -> Network {
        stay_in_memory();
        Network {
            servers,
            connections: RefCell::default(),
            pending: RefCell::default(),
            order,
            outage: Cell::new(None),
            recorded: RefCell::default(),
        }
    }

    pub(super) fn urls(&self, whose: ConnectionOwner) -> Vec<String> {
        let url = |node: usize| format!("redis://{}-{node}/", whose.word());
        (0..self.servers.len()).map(url).collect()
    }

    /// Delivers one thing: a connection, a request or a reply. False if there is none.
    pub(super) fn step(&self, whose: ConnectionOwner) -> bool {
        self.gather();
        if self.accept(whose) {
            return true;
        }
        let mut connections = self.connections.borrow_mut();
        let mut deliverable: Vec<_> = connections
            .iter_mut()
            .filter(|connection| whose.has(&connection.address) && !self.holds_back(connection))
            .collect();
        let all = self.order == Order::Together;
        if self.order == Order::AnswersFirst && !pass(&mut deliverable, Connection::reply, all).is_empty() {
            return true;
        }
        let nodes = pass(&mut deliverable, Connection::deliver, all);
        if nodes.is_empty() {
            return !pass(&mut deliverable, Connection::reply, all).is_empty();
        }
        // The requests may have published messages: read them.
        let published = connections.iter_mut().filter(|connection| nodes.contains(&connection.node));
        published.for_each(Connection::read_messages);
        true
    }

    /// Records what is in flight for the subject: the name of each request, and `at` how many
    /// nodes.
    pub(super) fn record_in_flight(&self) {
        self.gather();
        let mut in_flight = BTreeMap::<String, BTreeSet<usize>>::new();
        for connection in self
            .connections
            .borrow()
            .iter()
            .filter(|connection| ConnectionOwner::Subject.has(&connection.address))
        {
            for name in connection.in_flight() {
                let name =
                    if self.holds_back(connection) { format!("{name} held back") } else { name.to_owned() };
                in_flight.entry(name).or_default().insert(connection.node);
            }
        }
        for pending in
            self.pending.borrow().iter().filter(|pending| ConnectionOwner::Subject.has(&pending.address))
        {
            let word = match self.outage_of(&pending.address) {
                None => "connect",
                Some(Outage::Silent) => "connect held back",
                Some(Outage::Refuses) => "connect refused",
            };
            in_flight.entry(word.to_owned()).or_default().insert(node_of(&pending.address));
        }
        let mut recorded = self.recorded.borrow_mut();
        if in_flight.is_empty() {
            recorded.insert("nothing".to_owned());
        }
        recorded.extend(in_flight.iter().map(|(name, nodes)| format!("{name} at {}", nodes.len())));
    }

    /// Takes what was recorded since the last call.
    pub(super) fn take_recorded(&self) -> BTreeSet<String> {
        self.recorded.take()
    }

    fn gather(&self) {
        self.pending.borrow_mut().extend(pending_connections());
        let mut connections = self.connections.borrow_mut();
        connections.iter_mut().for_each(Connection::gather);
        connections.retain(|connection| !connection.is_over());
    }

    fn accept(&self, whose: ConnectionOwner) -> bool {
        let mut pending = self.pending.borrow_mut();
        pending.retain(|call| !call.accept.is_closed());
        let passes = |call: &PendingConnection| {
            whose.has(&call.address) && self.outage_of(&call.address) != Some(Outage::Silent)
        };
        let Some(first) = pending.iter().position(passes) else { return false };
        let PendingConnection { address, accept } = pending.remove(first);
        if self.outage_of(&address).is_some() {
            return true; // refused
        }
        let node = node_of(&address);
        let (theirs, ours) = tokio::io::duplex(CAPACITY);
        self.connections.borrow_mut().push(Connection::new(
            address,
            node,
            ours,
            self.servers[node].connect(),
        ));
        accept.send(theirs).ok();
        true
    }

    /// Cuts the subject's connections. Its requests are lost, or still delivered.
    pub(super) fn cut(&self, lost: bool) {
        self.gather();
        self.pending.borrow_mut().retain(|call| !ConnectionOwner::Subject.has(&call.address));
        for connection in self
            .connections
            .borrow_mut()
            .iter_mut()
            .filter(|connection| ConnectionOwner::Subject.has(&connection.address))
        {
            connection.cut();
            if lost {
                connection.drop_requests();
            }
        }
    }

    /// Silences the subject's current connections, or ends that.
    pub(super) fn silence(&self, is_silent: bool) {
        self.gather();
        for connection in self
            .connections
            .borrow_mut()
            .iter_mut()
            .filter(|connection| ConnectionOwner::Subject.has(&connection.address))
        {
            connection.is_silent = is_silent;
        }
    }

    /// Makes a node fail for the subject.
    pub(super) fn fail(&self, node: usize, how: Outage) {
        self.outage.set(Some((node, how)));
        if how == Outage::Refuses {
            self.gather();
            let mut connections = self.connections.borrow_mut();
            connections
                .iter_mut()
                .filter(|connection| self.outage_of(&connection.address).is_some())
                .for_each(Connection::cut);
        }
    }

    /// Ends all outages and silences.
    pub(super) fn restore(&self) {
        self.outage.set(None);
        self.silence(false);
    }

    fn outage_of(&self, address: &str) -> Option<Outage> {
        self.outage
            .get()
            .filter(|(node, _)| {
                ConnectionOwner::Subject.has(address) && [ALL, node_of(address)].contains(node)
            })
            .map(|(_, how)| how)
    }

    fn holds_back(&self, connection: &Connection) -> bool {
        connection.is_silent || self.outage_of(&connection.address) == Some(Outage::Silent)
    }

    /// Delivers everything until `work` is done.
    pub(super) async fn flow<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.deliver_until(what, &[ConnectionOwner::Rival, ConnectionOwner::Subject], work).await
    }

    /// Delivers everything but the subject's requests and replies until `work` is done.
    pub(super) async fn flow_beside<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.deliver_until(what, &[ConnectionOwner::Rival], work).await
    }

    async fn deliver_until<T>(
        &self,
        what: &str,
        whose: &[ConnectionOwner],
        work: impl Future<Output = T>,
    ) -> T {
        tokio::pin!(work);
        let (start, mut pause) = (Instant::now(), TICK);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(32 * TICK);
            for whose in whose {
                while self.step(*whose) {
                    pause = TICK;
                }
            }
            assert!(start.elapsed() < SOON, "not within {SOON:?}: {what}");
        }
    }

    /// Delivers everything until the condition is true.
    pub(super) async fn eventually(&self, what: &str, is: impl Fn() -> bool) {
        let becomes = async {
            while !is() {
                sleep(8 * TICK).await;
            }
        };
        self.flow(what, becomes).await;
    }
}

/// The index of an address' node.
fn node_of(address: &str) -> usize {
    address.split(['-', ':']).nth(1).unwrap().parse().unwrap()
}

/// Delivers one thing, or one thing of each connection. Returns the nodes of these connections.
fn pass(connections: &mut [&mut Connection], passes: fn(&mut Connection) -> bool, all: bool) -> Vec<usize> {
    let passed =
        connections.iter_mut().filter_map(|connection| passes(connection).then_some(connection.node));
    passed.take(if all { usize::MAX } else { 1 }).collect()
}
