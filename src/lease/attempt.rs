//! [`Attempt`]: one try to get a lock, from its first request to the release of what it got.
//! [`Kind`]: what differs from one kind of lock to another, as data.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use uuid::Uuid;

use crate::deployment::Deployment;
use crate::error::{Context, Error};
use crate::events::Observer;
use crate::fencing::FencingToken;
#[cfg(feature = "tracing")]
use crate::labels::Labels;
use crate::name::Name;
use crate::options::{Fencing, Options};
use crate::wire::{Call, InFlight, Nodes, Script, Word};

/// The longest time for which a lock is kept for a waiter that it was granted to and that has not
/// sent a request since.
const CLAIM: Duration = Duration::from_secs(3);

/// What the scripts assume where these arguments are empty: an argument that equals its default is
/// sent empty, since the same words again and again are work for the server.
const DEFAULT_MAX_DEPTH: u32 = 255;
const DEFAULT_TOKEN_TTL: Duration = Duration::from_secs(3600);

/// A token that several nodes are asked to accept.
#[derive(Clone, Copy)]
pub(super) struct Proposal {
    pub(super) token: u64,
    /// It counts also where the owner has a hold with an earlier token.
    pub(super) is_nested: bool,
}

/// How an attempt is queued. The same in each of its requests. Cheap to clone, and small: each
/// lease has a place for one, although few were queued.
#[derive(Clone)]
pub(super) struct QueueEntry(Arc<QueueTerms>);

struct QueueTerms {
    claim: Duration,
    channel: Option<Arc<str>>,
}

impl QueueEntry {
    /// How long a grant is kept for the attempt.
    pub(super) fn claim(&self) -> Duration {
        self.0.claim
    }
}

/// What all attempts of a client share.
#[derive(Debug)]
pub(crate) struct Origin {
    /// Not the nodes: a lease outlives its client, and would keep the connections open.
    deployment: Deployment,
    nodes: Arc<[String]>,
    /// What the text of each attempt ends with: the [labels](crate::labels::Labels).
    suffix: Arc<str>,
    observer: Arc<Observer>,
}

impl Origin {
    pub(super) fn new(nodes: &Nodes, suffix: String, observer: Arc<Observer>) -> Origin {
        let (deployment, nodes) = (nodes.deployment, Arc::clone(nodes.labels()));
        Origin { deployment, nodes, suffix: suffix.into(), observer }
    }
}

/// One try to get a lock. Each of its requests carries its id, which makes the requests idempotent.
pub(crate) struct Attempt {
    pub(super) kind: &'static Kind,
    pub(super) name: Name,
    pub(super) options: Arc<Options>,
    /// `None`: the attempt itself.
    owner: Option<Arc<str>>,
    pub(super) id: Uuid,
    origin: Arc<Origin>,
    /// Its requests whose effect is unknown.
    pub(super) in_flight: Arc<InFlight>,
    /// Its position in the queues, sent again to a node that has lost it.
    queued_at: OnceLock<u64>,
}

impl Attempt {
    /// Without an owner, the attempt itself is the owner.
    pub(crate) fn new(
        origin: Arc<Origin>,
        kind: &'static Kind,
        name: Name,
        options: Arc<Options>,
        owner: Option<String>,
    ) -> Attempt {
        let (id, owner) = (Uuid::new_v4(), owner.map(String::into));
        let (in_flight, queued_at) = (Arc::default(), OnceLock::new());
        Attempt { kind, name, options, owner, id, origin, in_flight, queued_at }
    }

    /// The same hold as another kind, with other options.
    pub(super) fn converted(&self, kind: &'static Kind, options: Arc<Options>) -> Attempt {
        let (name, owner, id, origin) =
            (self.name.clone(), self.owner.clone(), self.id, Arc::clone(&self.origin));
        let (in_flight, queued_at) = (Arc::clone(&self.in_flight), self.queued_at.clone());
        Attempt { kind, name, options, owner, id, origin, in_flight, queued_at }
    }

    /// Converts a hold of this attempt into one of this attempt's kind.
    pub(super) fn convert(&self, verb: &'static str) -> Arc<Call> {
        let call = self.call(verb).shared(millis(self.options.ttl)).shared(Word::MinimumToken);
        let call = call.shared(self.token_ttl());
        let is_guarded = self.origin.deployment.has_restart_guard;
        Arc::new(if is_guarded { call.at_node(&self.name.node()) } else { call })
    }

    /// Where to say what happens to it.
    pub(super) fn observer(&self) -> &Arc<Observer> {
        &self.origin.observer
    }

    /// The id and the labels of the client, as the server stores them.
    fn text(&self) -> String {
        format!("{}{}", self.id.simple(), self.origin.suffix)
    }

    /// The owner as the server knows it.
    pub(super) fn owner(&self) -> Cow<'_, str> {
        self.owner.as_deref().map_or_else(|| Cow::Owned(self.text()), Cow::Borrowed)
    }

    /// The label of the node that decides alone. `None` if several nodes decide: each has its own
    /// failure.
    pub(super) fn server(&self) -> Option<&str> {
        let Origin { nodes, deployment, .. } = &*self.origin;
        nodes.first().filter(|_| deployment.decides_alone()).map(String::as_str)
    }

    /// The client that the attempt belongs to, for logs.
    #[cfg(feature = "tracing")]
    pub(super) fn holder(&self) -> Option<String> {
        Labels::of_attempt(&self.text()).joint_name()
    }

    /// How this attempt is queued, notified through `channel` or polling.
    pub(super) fn queue_entry(&self, channel: Option<&Arc<str>>) -> QueueEntry {
        QueueEntry(Arc::new(QueueTerms { claim: self.claim(), channel: channel.cloned() }))
    }

    /// How long the lock is kept for this attempt once it is granted while it waits.
    pub(super) fn claim(&self) -> Duration {
        self.options.ttl.min(CLAIM)
    }

    /// Records when it was queued first, on the server's clock.
    pub(super) fn note_queued(&self, time: u64) {
        self.queued_at.get_or_init(|| time);
    }

    /// Whether this kind's script sends this refusal. Any other number is outside its contract:
    /// -5, for instance, means that this client sent a malformed request, and -1 that the attempt
    /// has ended, which a live one has not. Two never come here, since `wire` judges them: -1 of a
    /// request with a time limit, which came too late, and -9, the node has no vote.
    pub(super) fn may_refuse(&self, answer: i64) -> bool {
        matches!(answer, -3 | -2) || self.kind.refusals.iter().any(|(number, _)| *number == answer)
    }

    /// The error for a refusal: two that every kind's script sends, and those of this kind.
    pub(crate) fn refusal(&self, answer: i64, context: Context) -> Option<Error> {
        match answer {
            -2 => Some(Error::WrongType { context, found: self.kind.found }),
            -3 => Some(Error::WrongType { context, found: WITHOUT_TTL }),
            _ => {
                let (_, error) = self.kind.refusals.iter().find(|(number, _)| *number == answer)?;
                Some(error(&self.options, context))
            }
        }
    }

    /// The token of a grant. A script may answer with a token although fencing is off.
    pub(super) fn token(&self, token: u64) -> Option<FencingToken> {
        match self.options.fencing {
            Fencing::On => FencingToken::from_reply(token),
            Fencing::Off => None,
        }
    }

    pub(super) fn trusted_span(&self, ttl: Duration) -> Duration {
        trusted_span(ttl, self.options.drift)
    }

    /// Acquires. With a `proposal`, several nodes are asked to accept one token.
    pub(super) fn acquire(&self, entry: Option<&QueueEntry>, proposal: Option<Proposal>) -> Arc<Call> {
        let Some(Proposal { token, is_nested }) = proposal else {
            return self.request(self.options.ttl, (None, Word::MinimumToken), Word::Default, entry);
        };
        // The first proposal is its position in the queues of all nodes.
        self.note_queued(token);
        let purpose = if is_nested { "nested".into() } else { Word::Default };
        self.request(self.options.ttl, (Some(token), Word::Default), purpose, entry)
    }

    /// Acquires the lock again on a node that has lost it, under the token that the other nodes
    /// have.
    pub(super) fn repair(&self, ttl: Duration, token: Option<FencingToken>) -> Arc<Call> {
        self.request(ttl, (token.map(FencingToken::get), Word::Default), "repair".into(), None)
    }

    fn request(
        &self,
        ttl: Duration,
        (proposal, minimum_token): (Option<u64>, Word),
        purpose: Word,
        entry: Option<&QueueEntry>,
    ) -> Arc<Call> {
        let has_fencing = self.options.fencing == Fencing::On;
        let place = entry.and(self.queued_at.get().copied());
        let call = self.call(self.kind.verbs.acquire).own(place).own(proposal.filter(|_| has_fencing));
        let call = call.shared(millis(ttl)).shared(Some(minimum_token).filter(|_| has_fencing));
        let call = self
            .with_depth(queued_as(call, entry))
            .shared(self.options.grant_within.map(Word::Until))
            .shared(self.token_ttl())
            .shared(self.capacity())
            .shared(Word::Default)
            .shared(purpose)
            .replicated(self.options.wants_replicas());
        let is_guarded = self.origin.deployment.has_restart_guard;
        Arc::new(if is_guarded { call.shared(Word::Run).at_node(&self.name.node()) } else { call })
    }

    /// One poll for attempts of one client that are queued for the same lock with the same terms.
    pub(super) fn wait_many(
        verb: &'static str,
        entry: &QueueEntry,
        waiting: &[Arc<Attempt>],
    ) -> Option<Arc<Call>> {
        let first = waiting.first()?;
        let call = Call::new(first.kind.script, verb, &first.name).alone();
        let call = queued_as(call, Some(entry)).shared(u64::from(first.options.max_depth));
        let call = waiting.iter().fold(call, |call, attempt| call.own(attempt.id_word()));
        Some(Arc::new(waiting.iter().fold(call, |call, attempt| call.own(attempt.owner.as_ref()))))
    }

    /// A call for this attempt and its owner.
    fn call(&self, verb: &'static str) -> Call {
        let call = Call::new(self.kind.script, verb, &self.name).own(self.id_word());
        if self.kind.has_owner { call.own(self.owner.as_ref()) } else { call }
    }

    fn id_word(&self) -> Word {
        Word::Id(self.id, Arc::clone(&self.origin.suffix))
    }

    fn with_depth(&self, call: Call) -> Call {
        let depth = self.options.max_depth;
        if self.kind.has_owner {
            call.shared((depth != DEFAULT_MAX_DEPTH).then(|| u64::from(depth)))
        } else {
            call
        }
    }

    /// How many attempts may hold the lock or wait for it, unless it is the default.
    fn capacity(&self) -> Option<u64> {
        let Capacity { option, default } = self.kind.capacity.as_ref()?;
        let capacity = option(&self.options);
        (capacity != *default).then(|| capacity.into())
    }

    /// How long a new fencing counter is kept; `None` is the default.
    fn token_ttl(&self) -> Option<u64> {
        let span = self.options.token_ttl;
        (span != DEFAULT_TOKEN_TTL).then(|| millis(span))
    }

    /// Extends the lease. Without a TTL it only asks whether the owner holds the lock: scripts of
    /// kinds that may be re-entered never shorten what is left. Any other kind's would set it to a
    /// millisecond.
    pub(super) fn renew(&self, ttl: Option<Duration>) -> Arc<Call> {
        debug_assert!(ttl.is_some() || self.kind.may_reenter, "asking would end the lease");
        Arc::new(self.call(self.kind.verbs.renew).shared(ttl.map_or(1, millis)))
    }

    /// Releases what the attempt holds and its place in the queue. With `is_final`, the server also
    /// refuses requests of it that arrive later.
    pub(super) fn release(&self, is_final: bool, entry: Option<&QueueEntry>) -> Arc<Call> {
        Arc::new(self.ending(is_final, entry))
    }

    /// Revokes the lock from its holder, or only from the one that is named. This attempt only
    /// identifies the request.
    pub(crate) fn force(&self, holder: Option<&str>) -> Arc<Call> {
        let call = self.ending(false, None).shared(Word::Default);
        Arc::new(call.shared(self.kind.force).shared(holder))
    }

    fn ending(&self, is_final: bool, entry: Option<&QueueEntry>) -> Call {
        let call = self.call(self.kind.verbs.release).own(Word::Default);
        let call = call.shared(Word::MinimumToken).shared(is_final.then_some(1));
        self.with_depth(queued_as(call, entry)).shared(self.token_ttl())
    }

    /// What the nodes know about the lock.
    pub(super) fn inspect(&self) -> Arc<Call> {
        Arc::new(self.kind.inspect(&self.name))
    }
}

impl Kind {
    /// What the nodes know about a lock of this kind.
    pub(crate) fn inspect(&self, name: &Name) -> Call {
        Call::new(self.script, self.verbs.inspect, name)
    }
}

fn queued_as(call: Call, entry: Option<&QueueEntry>) -> Call {
    let terms = entry.map(|QueueEntry(terms)| terms);
    call.shared(terms.map(|terms| millis(terms.claim))).shared(terms.and_then(|terms| terms.channel.as_ref()))
}

/// Whole milliseconds, at least one.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// A request for an attempt whose reply is not known yet.
pub(super) struct SentRequest(Arc<Attempt>);

impl SentRequest {
    pub(super) fn new(attempt: &Arc<Attempt>) -> SentRequest {
        attempt.in_flight.sent();
        SentRequest(Arc::clone(attempt))
    }

    pub(super) fn answered(self) {
        self.0.in_flight.answered();
    }
}

/// Always subtracted from a lease: the server counts in whole milliseconds, and expires keys up to
/// one late.
const EXPIRY_GRANULARITY: Duration = Duration::from_millis(2);

/// How long a lease of `ttl` may be trusted, counted from before its request was sent
/// ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/): TTL less
/// drift).
fn trusted_span(ttl: Duration, drift: f64) -> Duration {
    ttl.mul_f64(1.0 - drift).saturating_sub(EXPIRY_GRANULARITY)
}

/// A kind of lock: its name, its script, and what the wait loop must know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// What its key holds, human-readable.
    pub(crate) found: &'static str,
    /// An owner that holds the lock may enter again, ahead of every waiter. Its `renew` must then
    /// keep what is left of the hold if it is asked for less: the client asks so without extending.
    pub(crate) may_reenter: bool,
    /// Its requests name an owner.
    pub(crate) has_owner: bool,
    pub(crate) queue: Queue,
    /// The refusals that not every kind's script sends.
    pub(crate) refusals: &'static [Refusal],
    /// How many attempts may hold the lock or wait for it at a time, where several may.
    pub(crate) capacity: Option<Capacity>,
    pub(crate) script: &'static Script,
    pub(crate) verbs: Verbs,
    /// The word of a release that revokes the lock.
    pub(crate) force: &'static str,
}

/// The calls of a kind, named for errors: what follows the stroke is the verb of its script.
pub(crate) struct Verbs {
    pub(crate) acquire: &'static str,
    /// Polls for many waiters of one lock at once. Kinds whose tasks all wait in Redis have it.
    pub(crate) wait: Option<&'static str>,
    pub(crate) renew: &'static str,
    pub(crate) release: &'static str,
    pub(crate) inspect: &'static str,
}

/// How many attempts may hold a lock or wait for it.
pub(crate) struct Capacity {
    pub(crate) option: fn(&Options) -> u32,
    /// What the script assumes where the argument is empty.
    pub(crate) default: u32,
}

/// A refusal of a script: its number, and the error for it.
pub(crate) type Refusal = (i64, fn(&Options, Context) -> Error);

/// What every kind refuses: another program wrote it.
pub(crate) const WITHOUT_TTL: &str = "a value without a TTL, which is no lock of this crate";

/// The refusal of every kind that has owners.
pub(crate) const TOO_DEEP: Refusal =
    (-4, |options, context| Error::TooDeep { context, depth: options.max_depth });

/// Where the tasks of one client wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Inside the client: one of them waits in Redis for all.
    Inside,
    /// Inside the client, unless the request has an owner: the owner may hold what the tasks ahead
    /// of it wait for, and would deadlock with them.
    InsideUnlessOwned,
    /// Each task in Redis, since one release may admit all of them.
    InRedis,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_and_expiry_granularity_are_subtracted() {
        assert_eq!(trusted_span(Duration::from_secs(10), 0.01), Duration::from_millis(9_898));
        assert_eq!(trusted_span(Duration::from_millis(1), 0.5), Duration::ZERO);
    }
}
