//! [`Attempt`]: one try to get a lock, from its first request to the release of what it got.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use uuid::Uuid;

use super::{Kind, ScriptSet, validity};
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::name::Name;
use crate::options::{Fencing, Options, RestartGuard};
use crate::wire::{Call, Doubt, Script};

/// For how long a server remembers that an attempt was ended, so as to refuse it if it arrives late.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The longest that a lock is kept for a waiter that it was handed to and that has not answered.
const CLAIM: Duration = Duration::from_secs(3);

/// A token that several nodes are asked to accept.
#[derive(Clone, Copy)]
pub(super) struct Proposal {
    pub(super) token: u64,
    /// Also where the owner has a hold with an earlier one.
    pub(super) for_nested: bool,
}

/// One try to get a lock. Its id is in every request of it, which makes each of them idempotent.
pub(crate) struct Attempt {
    pub(super) kind: &'static Kind,
    pub(super) name: Name,
    pub(super) options: Arc<Options>,
    pub(super) owner: String,
    pub(super) id: Uuid,
    text: String,
    ended: String,
    /// What is not known of its requests.
    pub(super) doubt: Arc<Doubt>,
    since: OnceLock<u64>,
}

impl Attempt {
    /// Without an owner, the attempt itself is the owner.
    pub(crate) fn new(
        kind: &'static Kind,
        name: Name,
        options: Arc<Options>,
        owner: Option<String>,
    ) -> Attempt {
        let id = Uuid::new_v4();
        let text = id.simple().to_string();
        let ended = name.ended(&text);
        let owner = owner.unwrap_or_else(|| text.clone());
        let (doubt, since) = (Arc::default(), OnceLock::new());
        Attempt { kind, name, options, owner, id, text, ended, doubt, since }
    }

    /// The same hold, from now on of another kind and with other options.
    pub(super) fn exchanged(&self, kind: &'static Kind, options: Arc<Options>) -> Attempt {
        let (name, owner) = (self.name.clone(), self.owner.clone());
        let (id, text, ended) = (self.id, self.text.clone(), self.ended.clone());
        let (doubt, since) = (Arc::clone(&self.doubt), self.since.clone());
        Attempt { kind, name, options, owner, id, text, ended, doubt, since }
    }

    /// Makes a hold of this attempt one of this attempt's kind.
    pub(super) fn exchange(&self, scripts: &'static ScriptSet) -> Call<'_> {
        let guarded = self.options.restart_guard == RestartGuard::On;
        let call = Call::new(scripts.pick(guarded), &self.keys()[..3]);
        let call = if guarded { call.key(self.name.node()) } else { call };
        call.text(&self.owner).text(&self.text).number(millis(self.options.ttl)).floor()
    }

    /// How this attempt stands in the queue, told through `channel` or looking every `poll`; and its
    /// claim: for how long the lock is kept for it once it is handed over.
    pub(super) fn waiter(&self, channel: Option<&str>, poll: Duration) -> (String, Duration) {
        let claim = if channel.is_some() { self.claim() } else { 10 * poll };
        let (text, owner, channel) = (&self.text, &self.owner, channel.unwrap_or_default());
        (format!("{text} {} {owner} {channel}", claim.as_millis()), claim)
    }

    /// For how long the lock is kept for one who is told.
    pub(super) fn claim(&self) -> Duration {
        self.options.ttl.min(CLAIM)
    }

    /// What a script of any kind may refuse with.
    pub(crate) fn refusal(&self, answer: i64) -> Option<Error> {
        let name = self.name.clone();
        match answer {
            -2 => Some(Error::WrongType { name, found: self.kind.found }),
            -3 => Some(Error::WrongType { name, found: "a value without a ttl, so no lock of ours" }),
            -4 => Some(Error::TooDeep { name, depth: self.options.max_depth }),
            -6 => Some(Error::WouldDeadlock { name }),
            -7 => self.crowd().map(|limit| Error::Crowded { name, limit }),
            _ => None,
        }
    }

    /// The token of a grant. A script may know one that was not asked for.
    pub(super) fn token(&self, token: u64) -> Option<FencingToken> {
        match self.options.fencing {
            Fencing::On => FencingToken::from_reply(token),
            Fencing::Off => None,
        }
    }

    pub(super) fn trusted(&self, ttl: Duration) -> Duration {
        validity::trusted(ttl, self.options.drift)
    }

    /// A number may be proposed as the token: several nodes must agree on one.
    pub(super) fn acquire<'a>(&'a self, waiter: &'a str, proposal: Option<Proposal>) -> Call<'a> {
        // Its first one is its place in the queues of all nodes.
        let since = proposal.map(|it| *self.since.get_or_init(|| it.token));
        let proposal = proposal.map(|it| format!("{}{}", if it.for_nested { '>' } else { '=' }, it.token));
        let for_quorum = proposal.is_some();
        self.take(for_quorum, self.options.ttl, waiter, proposal, since)
            .replicated(self.options.wants_replicas())
    }

    /// Takes the lock once more on a node that has lost it, under the token that it has elsewhere.
    pub(super) fn mend(&self, ttl: Duration, token: Option<FencingToken>) -> Call<'_> {
        self.take(true, ttl, "", token.map(|token| format!("~{token}")), None)
    }

    fn take<'a>(
        &'a self,
        for_quorum: bool,
        ttl: Duration,
        waiter: &'a str,
        proposal: Option<String>,
        since: Option<u64>,
    ) -> Call<'a> {
        let guarded = self.options.restart_guard == RestartGuard::On;
        let call = Call::new(self.kind.acquire.pick(for_quorum || guarded), &self.keys());
        let call = if guarded { call.key(self.name.node()) } else { call };
        let call = call.text(&self.owner).text(&self.text).number(millis(ttl));
        let call = match (self.options.fencing, proposal) {
            (Fencing::Off, _) => call.text(""),
            (Fencing::On, Some(proposal)) => call.owned(proposal),
            (Fencing::On, None) => call.floor(),
        };
        let call = call.number(self.options.max_depth.into());
        match self.crowd() {
            crowd if guarded || since.is_some() => {
                let call = call.text(waiter).number(crowd.unwrap_or_default().into());
                let call = if guarded { call.run() } else { call.text("") };
                since.into_iter().fold(call, Call::number)
            }
            Some(crowd) => call.text(waiter).number(crowd.into()),
            None if waiter.is_empty() => call,
            None => call.text(waiter),
        }
    }

    fn crowd(&self) -> Option<u32> {
        self.kind.crowd.map(|crowd| crowd(&self.options))
    }

    /// Extends the lease; with no ttl it only asks, since a further hold never shortens what is left.
    pub(super) fn renew(&self, ttl: Option<Duration>) -> Call<'_> {
        let ttl = ttl.map_or(1, millis);
        Call::new(&self.kind.renew, &[self.name.key()]).text(&self.owner).text(&self.text).number(ttl)
    }

    /// Gives up what the attempt holds and its place in the queue. With `for_good` the server also
    /// refuses what may still be under way of it.
    pub(super) fn release<'a>(&'a self, for_good: bool, waiter: &'a str) -> Call<'a> {
        let call = self.ending(&self.kind.release, for_good);
        if waiter.is_empty() { call } else { call.text(waiter) }
    }

    /// Takes the lock away from whoever holds it. This attempt only names the request.
    pub(crate) fn force(&self) -> Call<'_> {
        self.ending(&self.kind.force, true)
    }

    fn ending(&self, script: &'static Script, for_good: bool) -> Call<'_> {
        let keys = self.keys();
        Call::new(script, if for_good { &keys } else { &keys[..3] })
            .text(&self.owner)
            .text(&self.text)
            .number(if for_good { millis(REMEMBERED) } else { 0 })
            .floor()
    }

    fn keys(&self) -> [&str; 4] {
        [self.name.key(), self.name.fence(), self.name.waiters(), &self.ended]
    }
}

/// Whole milliseconds, at least one.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).max(1)
}
