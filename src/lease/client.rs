//! [`Client`]: what all locks of one application share, with the queue inside this process.
//! [`LockRequest`]: what one call asks of it.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use uuid::Uuid;

use super::attempt::{Attempt, Origin};
use super::keeper::Keeper;
use super::kind::{Kind, Queue};
use super::shared_poll::SharedPolls;
use crate::clock::Moment;
use crate::error::{ConfigError, Context, Error, Operation};
use crate::event::Acquiring;
use crate::events::Observer;
use crate::inspection::Holder;
use crate::name::Name;
use crate::options::Options;
use crate::owner::Owner;
use crate::wire::{
    Endpoint, Failure, Membership, Node, NodeReply, Nodes, Vote, WaitFor, WakeupEndpoint, WakeupSubscription,
};

/// The nodes, one keeper, one channel for wake-ups, and the queues inside this process.
pub(crate) struct Client {
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) wakeups: WakeupSubscription,
    pub(super) keeper: Arc<Keeper>,
    pub(super) local_queues: LocalQueues,
    pub(super) shared_polls: SharedPolls,
    origin: Arc<Origin>,
    pub(crate) observer: Arc<Observer>,
}

/// Where a client connects.
pub(crate) struct Servers {
    /// How to connect to each node, and where to subscribe to its wake-ups, if anywhere.
    pub(crate) nodes: Vec<(Endpoint, Option<WakeupEndpoint>)>,
    /// Which servers they may be, if a majority of them decides.
    pub(crate) membership: Option<Membership>,
    /// The wake-up endpoint was configured separately: it may be another server by mistake.
    pub(crate) must_verify: bool,
    /// What the connections are called in `CLIENT LIST`.
    pub(crate) name: Option<String>,
    /// What each attempt ends with: the [labels](crate::labels::Labels).
    pub(crate) attempt_suffix: String,
}

impl Client {
    /// A client that has not connected yet, with its keeper on the runtime that this is called
    /// from.
    pub(crate) fn new(servers: Servers, options: &Options) -> Arc<Client> {
        let Servers { nodes, membership, must_verify, name, attempt_suffix } = servers;
        let labels: Vec<String> = nodes.iter().map(|(endpoint, _)| endpoint.label()).collect();
        let membership = membership.map(Arc::new);
        let (mut made, mut wakeup_endpoints) = (Vec::new(), Vec::new());
        for (place, ((endpoint, wakeup_endpoint), label)) in nodes.into_iter().zip(labels).enumerate() {
            let place = membership.as_ref().map(|membership| (place, Arc::clone(membership)));
            let is_confirming = options.wants_replicas().is_some();
            let name = name.as_deref().map(Arc::from);
            made.push((Node::new(endpoint, options.node_timeout, is_confirming, place, name), label));
            wakeup_endpoints.extend(wakeup_endpoint);
        }
        let observer = Arc::<Observer>::default();
        let nodes = Arc::new(Nodes::new(made, &observer));
        // Scripts recognize a channel by this mark whose subscribers PUBLISH does not all count.
        let uncounted = if nodes.deployment.has_all_subscribers { "" } else { "~" };
        // A waiter is stored as words with blanks between them.
        let prefix = options.prefix.replace(char::is_whitespace, "_");
        let channel = format!("{prefix}wake:{}{uncounted}", Uuid::new_v4().simple());
        let has_wakeups = options.wakeups != crate::options::Wakeups::Poll
            && wakeup_endpoints.len() == nodes.deployment.nodes;
        let wakeups = WakeupSubscription::new(
            channel,
            has_wakeups.then_some(wakeup_endpoints),
            nodes.deployment,
            options.node_timeout,
        )
        .named(name.map(|name| format!("{name}:wakeups")));
        let wakeups = if must_verify { wakeups.verified_with(Arc::clone(&nodes)) } else { wakeups };
        Arc::new(Client {
            keeper: Keeper::start(Arc::clone(&nodes)),
            wakeups,
            local_queues: LocalQueues::default(),
            shared_polls: SharedPolls::default(),
            origin: Arc::new(Origin::new(&nodes, attempt_suffix, Arc::clone(&observer))),
            observer,
            nodes,
        })
    }

    /// Connects to a majority of the nodes. Fails if a node must not vote.
    pub(crate) async fn connect(&self) -> Result<(), Error> {
        let nodes = &self.nodes;
        let mut answers = nodes.no_replies();
        for (place, outcome) in nodes.connect().await.into_iter().enumerate() {
            if let Some(problem) = nodes.node(place).problem() {
                let node = nodes.label(place).to_owned();
                return Err(ConfigError::Node { node, problem }.into());
            }
            answers = match outcome.map_err(Failure::unsent) {
                Ok(()) => answers.with(place, NodeReply::Granted),
                Err(failure) if nodes.deployment.decides_alone() => {
                    return Err(self.error(failure, self.context_of_nodes(Operation::Connect)));
                }
                Err(failure) => answers.with(place, NodeReply::Failed(failure)),
            };
        }
        if answers.failures().count() > answers.max_failures {
            let failure = Failure::no_majority(answers);
            return Err(self.error(failure, self.context_of_nodes(Operation::Connect)));
        }
        self.verify().await
    }

    /// Subscribes at once if the wake-up endpoint must be verified, and fails if it is another
    /// server.
    async fn verify(&self) -> Result<(), Error> {
        if !self.wakeups.is_to_be_verified() {
            return Ok(());
        }
        self.wakeups.start(2 * self.nodes.limit()).await;
        match self.wakeups.elsewhere() {
            Some(subscriber) => {
                let server = self.nodes.label(0).to_owned();
                Err(ConfigError::SubscriberElsewhere { subscriber, server }.into())
            }
            None => Ok(()),
        }
    }
}

impl Client {
    /// What an operation on a lock was doing, and on which server, for its errors.
    pub(crate) fn context(&self, operation: Operation, lock: &Name) -> Context {
        self.with_server(Context::of(operation, lock))
    }

    /// The same for an operation without a lock.
    pub(crate) fn context_of_nodes(&self, operation: Operation) -> Context {
        self.with_server(Context::new(operation))
    }

    /// If several nodes decide, each has its own failure.
    fn with_server(&self, context: Context) -> Context {
        if self.nodes.deployment.decides_alone() { context.on(self.nodes.label(0)) } else { context }
    }

    /// The error for the caller of an operation. Once the client's runtime has ended, that is the
    /// reason: its connections ended with it.
    pub(crate) fn error(&self, failure: Failure, context: Context) -> Error {
        if self.keeper.has_ended() {
            return Error::RuntimeEnded { context: context.with_verdict(false, failure.is_indeterminate()) };
        }
        failure.error(context)
    }

    /// Whether the runtime that the client was made on has ended.
    pub(crate) async fn has_ended(&self) -> bool {
        let (lives, alive) = tokio::sync::oneshot::channel();
        // A runtime that has ended drops the task.
        self.nodes.spawn(async move {
            let _dropped_meanwhile = lives.send(());
        });
        alive.await.is_err()
    }

    /// Whether no lock is held, being acquired or being released.
    pub(crate) fn is_idle(&self) -> bool {
        [self.keeper.entries(), self.wakeups.mailbox_count(), self.local_queues.entries()] == [0; 3]
    }

    /// Waits until everything that was dropped has been released.
    pub(crate) async fn settled(&self) {
        self.keeper.settled().await;
    }
}

/// Its counts are all zero once no lock is held, being acquired or being released.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("scheduled", &self.keeper.entries())
            .field("waiting", &self.wakeups.mailbox_count())
            .field("queues", &self.local_queues.entries())
            .finish()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.keeper.close();
    }
}

/// A name, with the client and the options to lock it with.
#[derive(Clone)]
pub(crate) struct NamedLock {
    pub(crate) client: Arc<Client>,
    pub(crate) options: Arc<Options>,
    pub(crate) name: Name,
}

impl NamedLock {
    pub(crate) fn request(&self, kind: &'static Kind, owner: Option<&Owner>) -> LockRequest {
        LockRequest {
            client: Arc::clone(&self.client),
            kind,
            name: self.name.clone(),
            options: Arc::clone(&self.options),
            owner: owner.map(Owner::to_string),
        }
    }
}

/// How often a waiter polls that cannot be notified.
const UNNOTIFIED_POLL: Duration = Duration::from_millis(100);

/// The lock, its kind, the owner and the options of one call. Without an owner, each attempt is its
/// own owner.
pub(crate) struct LockRequest {
    pub(crate) client: Arc<Client>,
    pub(crate) kind: &'static Kind,
    pub(crate) name: Name,
    pub(crate) options: Arc<Options>,
    pub(crate) owner: Option<String>,
}

impl LockRequest {
    pub(crate) fn attempt(&self) -> Attempt {
        let origin = Arc::clone(&self.client.origin);
        Attempt::new(origin, self.kind, self.name.clone(), Arc::clone(&self.options), self.owner.clone())
    }

    /// What spans, metrics and events say of it.
    pub(super) fn described(&self) -> Acquiring<'_> {
        let (observer, lock, kind) = (&*self.client.observer, &self.name, self.kind.name);
        Acquiring { observer, lock, kind, _owner: self.owner.as_deref() }
    }

    /// Since when its nodes have failed and how, as far as that matters to this request.
    pub(super) fn outage(&self) -> Option<(Moment, Failure)> {
        self.client.nodes.outage(self.options.wants_replicas().map_or(0, |(count, _)| count))
    }

    /// The longest pause between two polls. Clients differ by up to a sixteenth, so that they do
    /// not poll at the same moment.
    pub(super) fn poll(&self, attempt: &Attempt, is_notified: bool) -> Duration {
        // A waiter that sends no request for as long as its claim counts as dead. If its messages
        // arrive, a poll is for that alone, and 0.9 s of a claim of 3 s are left for a slow one.
        let longest = attempt.claim().mul_f64(if is_notified { 0.7 } else { 0.5 });
        let cap = if is_notified { longest } else { UNNOTIFIED_POLL.min(longest) }.min(self.options.poll_cap);
        cap.mul_f64(1.0 - f64::from(attempt.id.as_bytes()[0]) / 4096.0)
    }

    pub(super) fn queues_inside(&self) -> bool {
        match self.kind.queue {
            Queue::Inside => true,
            Queue::InsideUnlessOwned => self.owner.is_none(),
            Queue::InRedis => false,
        }
    }

    /// Whether it enters a lock that its owner holds.
    pub(super) fn may_enter(&self) -> bool {
        self.kind.may_reenter && self.owner.is_some()
    }

    /// The owner that holds the lock, if a majority of the nodes name it. For kinds with one owner
    /// at a time.
    pub(super) async fn holder(&self) -> Option<String> {
        let nodes = &self.client.nodes;
        let call = Arc::new(self.kind.inspect(&self.name));
        let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::All).await;
        let named = |(_, outcome): &Vote| -> Option<String> {
            // Status, last token, waiters and time come first.
            let texts = outcome.as_ref().ok()?.texts().ok()?;
            Holder::from_reply(texts.get(4..)?).map(|holder| holder.owner)
        };
        let owners: Vec<String> = votes.received.iter().filter_map(named).collect();
        let naming = |owner: &&String| owners.iter().filter(|other| other == owner).count();
        owners.iter().find(|owner| naming(owner) >= nodes.deployment.majority()).cloned()
    }

    /// The operation, lock and server, for errors.
    pub(super) fn context(&self) -> Context {
        self.client.context(Operation::Acquire, &self.name)
    }

    /// The error for the caller.
    pub(super) fn error(&self, failure: Failure) -> Error {
        self.client.error(failure, self.context())
    }

    pub(super) fn lost(&self) -> Error {
        Error::Lost { context: self.context() }
    }
}

/// Runs a call that acquires. When the client is closed, the call is dropped, as its caller may
/// drop it at any time: that releases what it was granted and leaves the queue.
///
/// The caller has an [`OpenCall`], from before this checks whether the client is closed. `close`
/// works in the reverse order, so one of the two notices the other. An async function stores an
/// argument twice, so the call, which is large, is borrowed; it is dropped before its `OpenCall`.
pub(super) async fn unless_closed<T>(
    request: &LockRequest,
    mut call: Pin<&mut impl Future<Output = Result<T, Error>>>,
) -> Result<T, Error> {
    let keeper = &request.client.keeper;
    let outcome = tokio::select! {
        biased;
        () = keeper.closing.wait_until_begun() => None,
        outcome = &mut call => Some(outcome),
    };
    match outcome {
        // A lease that was granted after `close` took all leases is dropped here.
        Some(outcome) if !keeper.closing.has_begun() => outcome,
        _ => Err(Error::Closed { context: request.context() }),
    }
}

/// One queue per lock, first come first served. A lock without local waiters has no entry.
#[derive(Debug, Default)]
pub(super) struct LocalQueues(Arc<Mutex<HashMap<Name, LocalQueue>>>);

#[derive(Debug)]
struct LocalQueue {
    /// Where tasks wait for their turn. `None` until the first one waits: the first task has the
    /// turn without a permit.
    turn: Option<Arc<Semaphore>>,
    /// `None` until the first task waits: a lock without competition needs none.
    events: Option<watch::Sender<LockEvent>>,
    waiters: usize,
    /// How many of the tasks may enter at once if their owner holds the lock.
    entering: usize,
}

/// What the local waiters of a lock learn without a request of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LockEvent {
    None,
    /// This owner was granted the lock, by this client or, as the task at the front noticed,
    /// elsewhere.
    HeldBy(String),
    /// A request of the task at the front has failed.
    Failing,
}

/// A task that waits for its turn. Dropped, it leaves the queue.
#[derive(Debug)]
pub(super) struct LocalWaiter {
    turn: Arc<Semaphore>,
    events: watch::Receiver<LockEvent>,
    entry: LocalEntry,
}

/// The turn, until it is dropped.
#[derive(Debug)]
pub(super) struct LocalTurn {
    // Fields are dropped in this order: first the next task gets the turn, then the entry is
    // removed.
    _turn: Option<OwnedSemaphorePermit>,
    _entry: LocalEntry,
}

#[derive(Debug)]
struct LocalEntry {
    name: Name,
    may_enter: bool,
    /// It had the turn when it joined the empty queue.
    is_first: bool,
    local_queues: Arc<Mutex<HashMap<Name, LocalQueue>>>,
}

impl LocalQueues {
    /// Joins the queue of a lock, and takes the turn if no task has it. A task that `may_enter`
    /// enters at once if its owner holds the lock.
    pub(super) fn join(&self, name: &Name, may_enter: bool) -> Result<LocalTurn, LocalWaiter> {
        let mut local_queues = lock(&self.0);
        let local_queue = local_queues.entry(name.clone()).or_insert_with(|| LocalQueue {
            turn: None,
            events: None,
            waiters: 0,
            entering: 0,
        });
        local_queue.waiters += 1;
        local_queue.entering += usize::from(may_enter);
        let is_first = local_queue.waiters == 1;
        let entry = LocalEntry { name: name.clone(), may_enter, is_first, local_queues: Arc::clone(&self.0) };
        if is_first {
            return Ok(LocalTurn { _turn: None, _entry: entry });
        }
        let turn = Arc::clone(local_queue.turn.get_or_insert_with(|| Arc::new(Semaphore::new(0))));
        match Arc::clone(&turn).try_acquire_owned() {
            Ok(turn) => Ok(LocalTurn { _turn: Some(turn), _entry: entry }),
            // Under the same lock: events after this reach the task.
            Err(_) => {
                let events = local_queue.events.get_or_insert_with(|| watch::Sender::new(LockEvent::None));
                Err(LocalWaiter { turn, events: events.subscribe(), entry })
            }
        }
    }

    /// Whether tasks behind the front may enter once their owner holds the lock.
    pub(super) fn has_nested_waiters_behind(&self, name: &Name, front: &LocalTurn) -> bool {
        let own = usize::from(front._entry.may_enter);
        lock(&self.0).get(name).is_some_and(|local_queue| local_queue.entering > own)
    }

    /// Notifies the local waiters of a lock.
    pub(super) fn announce(&self, name: &Name, event: LockEvent) {
        if let Some(sender) = lock(&self.0).get(name).and_then(|local_queue| local_queue.events.as_ref()) {
            sender.send_replace(event);
        }
    }

    /// Notifies the local waiters of a lock if some of them may enter it now.
    pub(super) fn announce_grant(&self, name: &Name, owner: &str) {
        let local_queues = lock(&self.0);
        let local_queue = local_queues.get(name).filter(|local_queue| local_queue.entering > 0);
        if let Some(sender) = local_queue.and_then(|local_queue| local_queue.events.as_ref()) {
            sender.send_replace(LockEvent::HeldBy(owner.to_owned()));
        }
    }

    /// How many locks have local waiters.
    pub(super) fn entries(&self) -> usize {
        lock(&self.0).len()
    }
}

impl LocalWaiter {
    /// Splits the waiter into a future of the turn and a receiver of events.
    pub(super) fn split(self) -> (impl Future<Output = LocalTurn>, watch::Receiver<LockEvent>) {
        let LocalWaiter { turn, events, entry } = self;
        let front = async move {
            // It fails only if the semaphore is closed, which no code does.
            LocalTurn { _turn: turn.acquire_owned().await.ok(), _entry: entry }
        };
        (front, events)
    }
}

impl Drop for LocalEntry {
    fn drop(&mut self) {
        let mut local_queues = lock(&self.local_queues);
        if let Some(local_queue) = local_queues.get_mut(&self.name) {
            local_queue.waiters -= 1;
            local_queue.entering -= usize::from(self.may_enter);
            if local_queue.waiters == 0 {
                local_queues.remove(&self.name);
            } else if let Some(turn) = local_queue.turn.clone().filter(|_| self.is_first) {
                drop(local_queues);
                turn.add_permits(1);
            }
        }
    }
}

/// Poisoning does not matter: nothing under this lock panics.
fn lock(local_queues: &Mutex<HashMap<Name, LocalQueue>>) -> MutexGuard<'_, HashMap<Name, LocalQueue>> {
    local_queues.lock().unwrap_or_else(PoisonError::into_inner)
}
