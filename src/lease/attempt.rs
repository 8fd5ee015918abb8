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
use crate::wire::{Call, InFlight, ManyScript, Nodes, Script};

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
    suffix: String,
    observer: Arc<Observer>,
}

impl Origin {
    pub(super) fn new(nodes: &Nodes, suffix: String, observer: Arc<Observer>) -> Origin {
        Origin { deployment: nodes.deployment, nodes: Arc::clone(nodes.labels()), suffix, observer }
    }
}

/// One try to get a lock. Each of its requests carries its id, which makes the requests idempotent.
pub(crate) struct Attempt {
    pub(super) kind: &'static Kind,
    pub(super) name: Name,
    pub(super) options: Arc<Options>,
    /// `None`: the attempt itself.
    owner: Option<Box<str>>,
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
    pub(super) fn convert(&self, scripts: &'static ScriptSet) -> Call<'_> {
        let is_guarded = self.origin.deployment.has_restart_guard;
        let call = Call::new(scripts.pick(is_guarded), &self.keys());
        let call = if is_guarded { call.key(self.name.node()) } else { call };
        let call = self.with_owner(call.id(self.id, &self.origin.suffix).number(millis(self.options.ttl)));
        call.minimum_token().optional(self.token_ttl())
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

    /// Whether scripts of this kind send this refusal. Any other number is outside their contract:
    /// -5, for instance, means that this client sent a malformed request, and -1 that the attempt
    /// has ended, which a live one has not. Two never come here, since `wire` judges them: -1 of a
    /// request with a time limit, which came too late, and -9, the node has no vote.
    pub(super) fn may_refuse(&self, answer: i64) -> bool {
        matches!(answer, -3 | -2) || self.kind.refusals.iter().any(|(number, _)| *number == answer)
    }

    /// The error for a refusal: two that every kind's scripts send, and those of this kind.
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
    pub(super) fn acquire(&self, entry: Option<&QueueEntry>, proposal: Option<Proposal>) -> Call<'_> {
        let call = match proposal {
            Some(Proposal { token, is_nested }) => {
                // The first proposal is its position in the queues of all nodes.
                self.note_queued(token);
                // The script for many locks knows no node that has to be admitted. A free lock is
                // granted whatever the place in its queue would be.
                let is_common = !is_nested
                    && self.options.grant_within.is_none()
                    && !self.origin.deployment.has_restart_guard;
                self.propose(self.options.ttl, Some(token), if is_nested { "nested" } else { "" }, entry)
                    .with_others(is_common.then_some(&self.kind.propose_many))
            }
            None => {
                let call = Call::new(&self.kind.acquire.server, &self.keys());
                let call =
                    self.with_owner(call.id(self.id, &self.origin.suffix).number(millis(self.options.ttl)));
                let call =
                    if self.options.fencing == Fencing::On { call.minimum_token() } else { call.default() };
                // The script for many locks knows no place in a queue and no time limit.
                let is_common = self.options.grant_within.is_none() && self.queued_at.get().is_none();
                self.with_capacity(self.with_options(call, entry))
                    .with_others(is_common.then_some(&self.kind.acquire_many))
            }
        };
        call.replicated(self.options.wants_replicas())
    }

    /// One poll for attempts of one client that are queued for the same lock with the same terms.
    pub(super) fn wait_many<'a>(
        script: &'static Script,
        entry: &QueueEntry,
        waiting: &'a [Arc<Attempt>],
    ) -> Option<Call<'a>> {
        let first = waiting.first()?;
        let call = queued_as(Call::new(script, &[first.name.key(), first.name.waiters()]), Some(entry));
        let add = |call: Call<'a>, attempt: &'a Arc<Attempt>| {
            call.id(attempt.id, &attempt.origin.suffix).text(attempt.owner.as_deref().unwrap_or(""))
        };
        Some(waiting.iter().fold(first.with_depth(call), add))
    }

    /// Acquires the lock again on a node that has lost it, under the token that the other nodes
    /// have.
    pub(super) fn repair(&self, ttl: Duration, token: Option<FencingToken>) -> Call<'_> {
        self.propose(ttl, token.map(FencingToken::get), "repair", None)
    }

    fn propose(
        &self,
        ttl: Duration,
        token: Option<u64>,
        purpose: &'static str,
        entry: Option<&QueueEntry>,
    ) -> Call<'_> {
        let is_guarded = self.origin.deployment.has_restart_guard;
        let call = Call::new(&self.kind.acquire.proposing, &self.keys());
        let call = if is_guarded { call.key(self.name.node()) } else { call };
        let call = self.with_owner(call.id(self.id, &self.origin.suffix).number(millis(ttl)));
        let call = call.optional(token.filter(|_| self.options.fencing == Fencing::On)).text(purpose);
        let call = self.with_options(call, entry);
        self.with_capacity(if is_guarded { call.run() } else { call.default() })
    }

    fn with_owner<'a>(&'a self, call: Call<'a>) -> Call<'a> {
        match self.kind.has_owner {
            true => match &self.owner {
                Some(owner) => call.text(owner),
                None => call.default(),
            },
            false => call,
        }
    }

    fn with_options<'a>(&self, call: Call<'a>, entry: Option<&QueueEntry>) -> Call<'a> {
        let place = entry.and(self.queued_at.get().copied());
        self.with_depth(queued_as(call, entry))
            .optional(place)
            .until(self.options.grant_within)
            .optional(self.token_ttl())
    }

    fn with_depth<'a>(&self, call: Call<'a>) -> Call<'a> {
        let depth = self.options.max_depth;
        if self.kind.has_owner {
            call.optional((depth != DEFAULT_MAX_DEPTH).then(|| depth.into()))
        } else {
            call
        }
    }

    fn with_capacity<'a>(&self, call: Call<'a>) -> Call<'a> {
        match &self.kind.capacity {
            Some(Capacity { option, default }) => {
                let capacity = option(&self.options);
                call.optional((capacity != *default).then(|| capacity.into()))
            }
            None => call,
        }
    }

    /// How long a new fencing counter is kept; `None` is the default.
    fn token_ttl(&self) -> Option<u64> {
        let span = self.options.token_ttl;
        (span != DEFAULT_TOKEN_TTL).then(|| millis(span))
    }

    /// Extends the lease. Without a TTL it only asks whether the owner holds the lock: scripts of
    /// kinds that may be re-entered never shorten what is left. Any other kind's would set it to a
    /// millisecond.
    pub(super) fn renew(&self, ttl: Option<Duration>) -> Call<'_> {
        debug_assert!(ttl.is_some() || self.kind.may_reenter, "asking would end the lease");
        let ttl = ttl.map_or(1, millis);
        self.with_owner(
            Call::new(&self.kind.renew, &[self.name.key()]).id(self.id, &self.origin.suffix).number(ttl),
        )
        .with_others(Some(&self.kind.renew_many))
    }

    /// Releases what the attempt holds and its place in the queue. With `is_final`, the server also
    /// refuses requests of it that arrive later.
    pub(super) fn release(&self, is_final: bool, entry: Option<&QueueEntry>) -> Call<'_> {
        let call = Call::new(&self.kind.release, &self.keys()).id(self.id, &self.origin.suffix);
        let call = self.with_owner(call).minimum_token();
        let call = queued_as(call.optional(is_final.then_some(1)), entry);
        let is_common = !is_final && entry.is_none();
        self.with_depth(call)
            .optional(self.token_ttl())
            .with_others(is_common.then_some(&self.kind.release_many))
    }

    /// Revokes the lock from its holder, or only from the one that is named. This attempt only
    /// identifies the request.
    pub(crate) fn force<'a>(&'a self, holder: Option<&'a str>) -> Call<'a> {
        let call = Call::new(&self.kind.force, &self.keys())
            .id(self.id, &self.origin.suffix)
            .minimum_token()
            .optional(self.token_ttl());
        holder.into_iter().fold(call, Call::text)
    }

    /// What the nodes know about the lock.
    pub(super) fn inspect(&self) -> Call<'_> {
        self.kind.inspect(&self.name)
    }

    fn keys(&self) -> [&str; 3] {
        keys(&self.name)
    }
}

impl Kind {
    /// What the nodes know about a lock of this kind.
    pub(crate) fn inspect<'a>(&'static self, name: &'a Name) -> Call<'a> {
        Call::new(&self.inspect, &keys(name))
    }
}

/// The keys of a lock, in the order of every script.
fn keys(name: &Name) -> [&str; 3] {
    [name.key(), name.fence(), name.waiters()]
}

fn queued_as<'a>(call: Call<'a>, entry: Option<&QueueEntry>) -> Call<'a> {
    match entry {
        Some(QueueEntry(terms)) => {
            let call = call.number(millis(terms.claim));
            match &terms.channel {
                Some(channel) => call.owned_text(channel.to_string()),
                None => call.default(),
            }
        }
        None => call.default().default(),
    }
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

/// A kind of lock: its name, its scripts, and what the wait loop must know.
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
    /// The refusals that only some kinds' scripts send.
    pub(crate) refusals: &'static [Refusal],
    /// How many attempts may hold the lock or wait for it at a time, where several may.
    pub(crate) capacity: Option<Capacity>,
    pub(crate) acquire: ScriptSet,
    pub(crate) acquire_many: ManyScript,
    /// Polls for many waiters of one lock at once. Kinds whose tasks all wait in Redis have it.
    pub(crate) wait_many: Option<Script>,
    /// For nodes that decide by majority.
    pub(crate) propose_many: ManyScript,
    pub(crate) renew: Script,
    pub(crate) renew_many: ManyScript,
    pub(crate) release: Script,
    pub(crate) release_many: ManyScript,
    pub(crate) force: Script,
    pub(crate) inspect: Script,
}

/// How many attempts may hold a lock or wait for it.
pub(crate) struct Capacity {
    pub(crate) option: fn(&Options) -> u32,
    /// What the scripts assume where the argument is empty.
    pub(crate) default: u32,
}

/// A refusal of a script: its number, and the error for it.
pub(crate) type Refusal = (i64, fn(&Options, Context) -> Error);

/// What every kind refuses: another program wrote it.
pub(crate) const WITHOUT_TTL: &str = "a value without a TTL, which is no lock of this crate";

/// The refusal of every kind that has owners.
pub(crate) const TOO_DEEP: Refusal =
    (-4, |options, context| Error::TooDeep { context, depth: options.max_depth });

/// A verb with two scripts. They differ in where the token is chosen.
pub(crate) struct ScriptSet {
    /// For a node that decides alone: it chooses the token.
    pub(crate) server: Script,
    /// For nodes that decide by majority: the client proposes the token.
    pub(crate) proposing: Script,
}

impl ScriptSet {
    fn pick(&'static self, is_proposing: bool) -> &'static Script {
        if is_proposing { &self.proposing } else { &self.server }
    }
}

/// The script that renews many leases, of a kind that has owners.
pub(crate) const fn renew_many_by_owner(script: Script) -> ManyScript {
    ManyScript { script, keys: &[0], shared: &[1], own: &[0, 2], frees: false }
}

/// The script that acquires many locks, of a kind that has owners.
pub(crate) const fn many_by_owner(script: Script) -> ManyScript {
    ManyScript { script, keys: &[0, 1, 2], shared: &[1, 3, 9], own: &[0, 2], frees: false }
}

/// The same for nodes that decide by majority.
pub(crate) const fn many_proposals_by_owner(script: Script) -> ManyScript {
    ManyScript { script, keys: &[0, 1, 2], shared: &[1, 10], own: &[0, 2, 3], frees: false }
}

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
