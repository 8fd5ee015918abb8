//! [`LockRequest`]: what each call of a lock asks of its client.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::client::Client;
use super::kind::{Kind, Queue};
use super::local_queue::{LocalFront, LocalQueues};
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::inspection::Holder;
use crate::name::Name;
use crate::options::{Nesting, Options, Renewal};
use crate::owner::Owner;
use crate::traces::{Acquiring, event};
use crate::wire::{Ability, Failure, Vote, WaitFor};

/// How many tokens an attempt reserves at most: the scripts allow no more.
const MAX_TOKENS: u32 = 1_000;

/// How often a waiter polls that cannot be notified.
const UNNOTIFIED_POLL: Duration = Duration::from_millis(100);

/// A lock or one of its sides: its name, kind and owner, with the client and the options to acquire
/// it with. Without an owner, each attempt is its own owner.
#[derive(Clone)]
pub(crate) struct LockRequest {
    pub(crate) client: Arc<Client>,
    pub(crate) kind: &'static Kind,
    pub(crate) name: Name,
    pub(crate) options: Arc<Options>,
    pub(crate) owner: Option<Owner>,
}

impl LockRequest {
    /// The same lock for this owner.
    pub(crate) fn of(self, owner: &Owner) -> LockRequest {
        LockRequest { owner: Some(owner.clone()), ..self }
    }

    pub(crate) fn attempt(&self) -> Attempt {
        let origin = Arc::clone(&self.client.origin);
        Attempt::new(origin, self.kind, self.name.clone(), Arc::clone(&self.options), self.owner.clone())
    }

    /// What spans, metrics and events say of it.
    pub(super) fn described(&self) -> Acquiring<'_> {
        let (observer, lock, kind) = (&*self.client.origin.observer, &self.name, self.kind.name);
        Acquiring { observer, lock, kind, _owner: self.owner.as_ref().map(|owner| &*owner.0) }
    }

    /// Since when its nodes have failed and how, as far as that matters to this request.
    pub(super) fn outage(&self) -> Option<(Moment, Failure)> {
        let replicas = self.options.wants_replicas().map_or(0, |(count, _)| count);
        self.client.nodes.outage(&self.name, Ability::Replicate(replicas))
    }

    /// The same, of nodes that do not reply.
    pub(super) fn silence(&self) -> Option<(Moment, Failure)> {
        self.client.nodes.outage(&self.name, Ability::Reply)
    }

    /// The longest pause between two polls. Clients differ by up to a sixteenth, so that they do
    /// not poll at the same moment.
    pub(super) fn longest_pause(&self, attempt: &Attempt, is_notified: bool) -> Duration {
        // A waiter that sends no request for as long as its claim counts as dead. If its messages
        // arrive, a poll is for that alone, and 0.9 s of a claim of 3 s are left for a slow one.
        let longest = attempt.claim().mul_f64(if is_notified { 0.7 } else { 0.5 });
        let cap = if is_notified { longest } else { UNNOTIFIED_POLL.min(longest) }.min(self.options.poll_cap);
        cap.mul_f64(1.0 - f64::from(attempt.id.as_bytes()[0]) / 4096.0)
    }

    /// For how long tasks of this client may pass a hold on, or join it, from its grant by the
    /// server.
    pub(super) fn local_turn(&self) -> Duration {
        local_turn(&self.options, self.owner.as_ref())
    }

    /// Whether this attempt of another task is what it asks for.
    pub(super) fn is_for(&self, attempt: &Attempt) -> bool {
        self.has_terms(attempt.kind, &attempt.options)
    }

    /// Whether it asks for this kind of lock, with these options.
    pub(super) fn has_terms(&self, kind: &Kind, options: &Arc<Options>) -> bool {
        ptr::eq(self.kind, kind) && (Arc::ptr_eq(&self.options, options) || self.options == *options)
    }

    /// How many tokens an attempt of the task at the front reserves: one for each microsecond of
    /// its turn, if other tasks of this client compete for the lock, or did so lately: then some
    /// may come while it waits in Redis.
    ///
    /// A counter is rebuilt from the server's clock, so it must not run ahead of it: a hold that
    /// was leaked or revoked keeps what it reserved, and a request that gives back may be lost.
    pub(super) fn tokens(&self, front: &LocalFront) -> u32 {
        let most = u32::try_from(self.local_turn().as_micros()).unwrap_or(u32::MAX).min(MAX_TOKENS);
        let may_pass =
            || front.expects_others() && !front.is_slow() && !self.client.nodes.is_failing(&self.name);
        let is_behind = || front.last_token() < self.client.nodes.clock();
        if most > 1 && may_pass() && is_behind() { most } else { 1 }
    }

    pub(super) fn queues_inside(&self) -> bool {
        match self.kind.queue {
            Queue::Inside => true,
            Queue::InsideUnlessOwned => self.owner.is_none(),
            Queue::Shared => self.shares(),
        }
    }

    /// Whether tasks of this client share a hold.
    pub(super) fn shares(&self) -> bool {
        shares(self.kind, &self.options, self.owner.as_ref())
    }

    /// Whether calls of its owner have one hold together: the owner alone decides whether a call
    /// enters.
    pub(super) fn nests(&self) -> bool {
        self.options.nesting == Nesting::Local && self.kind.queue == Queue::Inside && self.may_enter()
    }

    /// Where its task waits for others of this client.
    pub(super) fn local_queues(&self) -> &LocalQueues {
        if self.shares() { &self.client.joint_queues } else { &self.client.local_queues }
    }

    /// Whether it enters a lock that its owner holds.
    pub(super) fn may_enter(&self) -> bool {
        self.kind.has_owner && self.owner.is_some()
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
        nodes.deployment.agreed(&owners).cloned()
    }

    /// The operation, lock and server, for errors.
    pub(crate) fn context(&self) -> Context {
        self.client.context(Operation::Acquire, &self.name)
    }

    /// The error for the caller.
    pub(super) fn error(&self, failure: Failure) -> Error {
        self.client.error(failure, self.context())
    }

    /// The limit of the call has elapsed. `was_busy`: the lock was in use, as far as is known.
    pub(crate) fn timed_out(&self, limit: Duration, was_busy: bool) -> Error {
        let holds_itself = self.client.is_held_by_caller(&self.name);
        Error::TimedOut { context: self.context(), limit, was_busy, holds_itself }
    }

    /// Says so if the lock is waited for by the task that holds it.
    pub(super) fn warn_of_waiting_for_itself(&self) {
        if cfg!(feature = "tracing") && self.client.is_held_by_caller(&self.name) {
            event!(warn, lock = %self.name, kind = self.kind.name,
                "a task waits for a lock that it holds itself: a nested call needs the owner of the outer one");
        }
    }

    pub(super) fn lost(&self) -> Error {
        Error::Lost { context: self.context(), reason: None }
    }

    pub(super) fn runtime_ended(&self) -> Error {
        Error::RuntimeEnded { context: self.context() }
    }
}

/// For how long tasks of one client may use a hold after each other, or together. One with an owner
/// has no such time: another process may enter it with that owner. Nor has one that is to last for
/// a time after its first task.
pub(super) fn local_turn(options: &Options, owner: Option<&Owner>) -> Duration {
    match options.renewal {
        Renewal::Automatic if owner.is_none() && options.minimum_hold().is_none() => options.local_turn,
        _ => Duration::ZERO,
    }
}

/// Whether tasks of one client share a hold, by the kind and its options.
pub(super) fn shares(kind: &Kind, options: &Options, owner: Option<&Owner>) -> bool {
    kind.queue == Queue::Shared && options.allow_joint_holds() && !local_turn(options, owner).is_zero()
}
