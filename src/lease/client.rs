//! [`Client`]: what all locks of one application share.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;
use uuid::Uuid;

use super::attempt::{Attempt, Origin};
use super::keeper::Keeper;
use super::local_queue::LocalQueues;
use super::schedule::UnreleasedHolds;
use super::shared_poll::SharedPolls;
use super::turn::{Caller, Turn};
use crate::error::{ConfigError, Context, Error, Operation};
use crate::events::Observer;
use crate::guarded::Guarded;
use crate::name::Name;
use crate::options::Options;
use crate::owner::Owner;
use crate::wire::{Endpoint, Failure, Membership, Node, NodeReply, Nodes, Reply, WakeupSubscription};

/// The lock and the owner of holds that nested calls share.
pub(super) type NestedKey = (Name, Option<Owner>);

/// The nodes, one keeper, one channel for wake-ups, and the queues inside this process.
pub(crate) struct Client {
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) wakeups: WakeupSubscription,
    pub(super) keeper: Arc<Keeper>,
    pub(super) local_queues: LocalQueues,
    /// Those of tasks that share a hold.
    pub(super) joint_queues: LocalQueues,
    /// Those that calls of one owner share.
    pub(super) nested_holds: Guarded<HashMap<NestedKey, Weak<dyn Any + Send + Sync>>>,
    pub(super) shared_polls: SharedPolls,
    pub(crate) origin: Arc<Origin>,
}

/// Where a client connects.
pub(crate) struct Servers {
    /// How to connect to each node.
    pub(crate) nodes: Vec<Endpoint>,
    /// Where to subscribe to the wake-ups of each.
    pub(crate) subscribers: Vec<Endpoint>,
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
        let Servers { nodes, subscribers, membership, must_verify, name, attempt_suffix } = servers;
        let membership = membership.map(Arc::new);
        let (observer, holds) = (Arc::<Observer>::default(), Arc::default());
        let node = |(place, endpoint)| {
            let place = membership.as_ref().map(|membership| (place, Arc::clone(membership)));
            let is_confirming = options.wants_replicas().is_some();
            let name = name.as_deref().map(Arc::from);
            let limit = options.node_timeout;
            Node::new(endpoint, limit, is_confirming, place, name, &holds, &observer)
        };
        let made = nodes.into_iter().enumerate().map(node).collect();
        let nodes = Arc::new(Nodes::new(made, holds));
        // Scripts recognize a channel by this mark whose subscribers PUBLISH does not all count.
        let uncounted = if nodes.deployment.has_all_subscribers { "" } else { "~" };
        // A waiter is stored as words with blanks between them.
        let prefix = options.prefix.replace(char::is_whitespace, "_");
        let channel = format!("{prefix}wake:{}{uncounted}", Uuid::new_v4().simple());
        let has_wakeups = options.wakeups != crate::options::Wakeups::Poll;
        let wakeups = WakeupSubscription::new(
            channel,
            has_wakeups.then_some(subscribers),
            nodes.deployment,
            options.node_timeout,
            name.map(|name| format!("{name}:wakeups")),
            must_verify.then(|| Arc::clone(&nodes)),
        );
        Arc::new_cyclic(|client: &Weak<Client>| Client {
            keeper: Keeper::start(Arc::clone(&nodes)),
            wakeups,
            local_queues: LocalQueues::default(),
            joint_queues: LocalQueues::default(),
            nested_holds: Guarded::default(),
            shared_polls: SharedPolls::default(),
            origin: Arc::new(Origin {
                server: nodes.deployment.decides_alone().then(|| nodes.labels[0].clone()),
                has_restart_guard: nodes.deployment.has_restart_guard,
                suffix: attempt_suffix.into(),
                observer,
                runtime: nodes.runtime.clone(),
                client: client.clone() as Weak<dyn Any + Send + Sync>,
            }),
            nodes,
        })
    }

    /// Connects to a majority of the nodes. Fails if a node must not vote.
    pub(crate) async fn connect(&self) -> Result<(), Error> {
        let nodes = &self.nodes;
        let mut answers = nodes.no_replies();
        for (place, outcome) in nodes.connect().await.into_iter().enumerate() {
            if let Some(problem) = nodes.node(place).problem() {
                let node = nodes.labels[place].clone();
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
                let server = self.nodes.labels[0].clone();
                Err(ConfigError::SubscriberElsewhere { subscriber, server }.into())
            }
            None => Ok(()),
        }
    }
}

impl Client {
    /// What an operation on a lock was doing, and on which server, for its errors.
    pub(crate) fn context(&self, operation: Operation, lock: &Name) -> Context {
        self.origin.on_server(Context::of(operation, lock))
    }

    /// The same for an operation without a lock.
    pub(crate) fn context_of_nodes(&self, operation: Operation) -> Context {
        self.origin.on_server(Context::new(operation))
    }

    /// The error for the caller of an operation. Once the client's runtime has ended, that is the
    /// reason: its connections ended with it.
    pub(crate) fn error(&self, failure: Failure, context: Context) -> Error {
        if self.keeper.has_ended() {
            return Error::RuntimeEnded { context: context.with_verdict(false, failure.is_indeterminate()) };
        }
        failure.error(context)
    }

    /// The error for a reply that is no success: a refusal, or outside the script's contract.
    pub(crate) fn refusal(&self, attempt: &Attempt, reply: &Reply, context: Context) -> Error {
        let refusal = attempt.refusal_in(reply, context.clone());
        refusal.unwrap_or_else(|| self.error(reply.unexpected(), context))
    }

    /// Whether the runtime that the client was made on has ended.
    pub(crate) async fn has_ended(&self) -> bool {
        let (lives, alive) = tokio::sync::oneshot::channel();
        // A runtime that has ended drops the task.
        self.nodes.runtime.spawn(async move {
            let _dropped_meanwhile = lives.send(());
        });
        alive.await.is_err()
    }

    /// Holds of the lock may have been revoked: no task of this client receives or joins one that
    /// was granted before now.
    pub(crate) fn note_revoked(&self, name: &Name) {
        [&self.local_queues, &self.joint_queues].into_iter().for_each(|queues| queues.note_revoked(name));
    }

    /// Whether this task or thread holds the lock, as far as that is known at little cost.
    pub(super) fn is_held_by_caller(&self, name: &Name) -> bool {
        let is_member = |turn: Arc<dyn Turn>| turn.is_used_by(Caller::current());
        self.keeper.is_held_by_caller(name) || self.joint_queues.shared_turn(name).is_some_and(is_member)
    }

    /// Whether no lock is held, being acquired or being released.
    pub(crate) fn is_idle(&self) -> bool {
        [self.keeper.entries(), self.wakeups.mailboxes.len(), self.queues()] == [0; 3]
            && self.nested_holds.lock().is_empty()
    }

    fn queues(&self) -> usize {
        self.local_queues.entries() + self.joint_queues.entries()
    }

    /// Waits until everything that was dropped has been released.
    pub(crate) async fn settled(&self) {
        // What a dropped guard has left to tasks that are not polled any more.
        [&self.local_queues, &self.joint_queues].into_iter().for_each(LocalQueues::end_turns);
        self.keeper.until(|schedule| schedule.open_releases.is_empty()).await;
    }
}

/// Callers may be on no tokio runtime, as a thread of the standard library or a task of another
/// executor: the timers of a call then are those of the client's runtime.
impl Client {
    /// Runs a call on its caller's runtime if there is one, else on the client's. `None`: the
    /// caller has none, and the client's has ended. A timer of an ended runtime panics.
    pub(crate) async fn with_runtime<F: Future>(&self, mut call: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|context| {
            if Handle::try_current().is_ok() {
                return call.as_mut().poll(context).map(Some);
            }
            let _poll = self.keeper.polls.read(); // before the check
            if self.keeper.has_ended() {
                return Poll::Ready(None);
            }
            let _entered = self.nodes.runtime.enter();
            call.as_mut().poll(context).map(Some)
        })
        .await
    }

    /// The same, of a call that may fail.
    pub(crate) async fn run<T>(
        &self,
        call: Pin<&mut impl Future<Output = Result<T, Error>>>,
        context: impl FnOnce() -> Context,
    ) -> Result<T, Error> {
        self.with_runtime(call).await.unwrap_or_else(|| Err(Error::RuntimeEnded { context: context() }))
    }
}

impl Client {
    /// Ends all leases and all calls that wait for a lock, and waits for at most `limit` until the
    /// servers have released them.
    ///
    /// # Cancel safety
    /// All leases have ended once this was polled; dropped, the releases continue in the
    /// background.
    pub(crate) async fn close(&self, limit: Duration) -> Result<(), Error> {
        let keeper = &self.keeper;
        keeper.end_all();
        self.local_queues.end_turns();
        self.joint_queues.end_turns();
        let waiting = pin!(async { timeout(limit, keeper.all_released()).await.is_ok() });
        let is_in_time = self.with_runtime(waiting).await.unwrap_or(false);
        if keeper.has_ended() {
            return Err(Error::RuntimeEnded {
                context: self.context_of_nodes(Operation::Close).with_verdict(false, true),
            });
        }
        match keeper.unreleased(is_in_time) {
            UnreleasedHolds { count: 0, .. } => Ok(()),
            UnreleasedHolds { count, names } => Err(Error::Unreleased { count, names, limit }),
        }
    }

    /// Drops this reference, and waits until what was dropped has been released, or was given up:
    /// the keeper of a client that others have gives nothing up.
    pub(crate) async fn into_settled(self: Arc<Client>) {
        let keeper = Arc::clone(&self.keeper);
        drop(self);
        keeper.until(|schedule| schedule.open_releases.is_empty() || keeper.has_ended()).await;
    }
}

/// Its counts are all zero once no lock is held, being acquired or being released.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("scheduled", &self.keeper.entries())
            .field("waiting", &self.wakeups.mailboxes.len())
            .field("queues", &self.queues())
            .finish()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.keeper.close();
    }
}
