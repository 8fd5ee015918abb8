//! The verbs of the scripts: the words of each call for every kind, in the order in which
//! `lua/README.md` specifies them.

use std::sync::Arc;
use std::time::Duration;

use super::attempt::{Attempt, QueueEntry};
use crate::fencing::FencingToken;
use crate::options::Fencing;
use crate::wire::{Call, Word};

/// What the scripts assume where these arguments are empty: an argument that equals its default is
/// sent empty, since the same words again and again are work for the server.
const DEFAULT_MAX_DEPTH: u32 = 255;
const DEFAULT_TOKEN_TTL: Duration = Duration::from_secs(3600);

/// A token that several nodes are asked to accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) token: u64,
    /// It counts also where the owner has a hold with an earlier token.
    pub(super) is_nested: bool,
}

impl Attempt {
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
            .shared(match self.kind.capacity {
                Some(capacity) => capacity(&self.options).map(u64::from),
                None => self.reserved_tokens(),
            })
            .shared(Word::All)
            .shared(purpose)
            .replicated(self.options.wants_replicas());
        self.guarded(call)
    }

    /// Extends the lease. Without a TTL it only asks whether the owner holds the lock: scripts of
    /// kinds that may be re-entered never shorten what is left. Any other kind's would set it to a
    /// millisecond.
    pub(super) fn renew(&self, ttl: Option<Duration>) -> Arc<Call> {
        debug_assert!(ttl.is_some() || self.kind.has_owner, "asking would end the lease");
        Arc::new(self.call(self.kind.verbs.renew).shared(ttl.map_or(1, millis)).of_one_key())
    }

    /// Continues the hold of a former attempt, and extends the lease. Replicas and the restart
    /// guard count as for an acquire: with less, two attempts might continue one hold.
    pub(super) fn adopt(&self, former: &str) -> Arc<Call> {
        let call = Call::new(self.kind.script, self.kind.verbs.renew, &self.name).own(former);
        let call = if self.kind.has_owner { call.own(self.owner_word()) } else { call };
        let call = call.shared(millis(self.options.ttl)).shared(self.id_word());
        let call = call.replicated(self.options.wants_replicas());
        self.guarded(call)
    }

    /// Releases what the attempt holds and its place in the queue. With `is_final`, the server also
    /// refuses requests of it that arrive later. What is left of the least time to hold the lock is
    /// that of now: a request that arrives late keeps the lock for longer.
    pub(super) fn release(&self, is_final: bool, entry: Option<&QueueEntry>) -> Arc<Call> {
        let call = self.ending(is_final, entry);
        let Some(left) = self.must_hold() else { return Arc::new(call) };
        // Rounded up; before it, two words of a forced release.
        let keep_ms = millis(left + Duration::from_millis(1));
        Arc::new(call.shared(Word::Default).shared(Word::Default).shared(keep_ms))
    }

    /// Revokes the lock from its holder, or only from the one that is named. This attempt only
    /// identifies the request.
    pub(crate) fn force(&self, holder: Option<&str>) -> Arc<Call> {
        Arc::new(self.ending(false, None).shared(self.kind.force).shared(holder))
    }

    fn ending(&self, is_final: bool, entry: Option<&QueueEntry>) -> Call {
        let call = self.call(self.kind.verbs.release).own(self.last_used());
        let call = call.shared(Word::MinimumToken).shared(is_final.then_some(1));
        self.with_depth(queued_as(call, entry)).shared(self.token_ttl()).shared(self.reserved_tokens())
    }

    /// What the nodes know about the lock.
    pub(super) fn inspect(&self) -> Arc<Call> {
        Arc::new(self.kind.inspect(&self.name))
    }

    /// Converts a hold of this attempt into one of this attempt's kind.
    pub(super) fn convert(&self, verb: &'static str) -> Arc<Call> {
        let call = self.call(verb).shared(millis(self.options.ttl)).shared(Word::MinimumToken);
        let call = call.shared(self.token_ttl()).shared(self.reserved_tokens()).shared(self.last_used());
        Arc::new(if self.origin.has_restart_guard { call.at_node(&self.name.node()) } else { call })
    }

    /// One poll for attempts of one client that are queued for the same lock with the same terms.
    pub(super) fn wait_all(entry: &QueueEntry, waiting: &[Arc<Attempt>]) -> Option<Arc<Call>> {
        let first = waiting.first()?;
        let call = Call::new(first.kind.script, first.kind.verbs.wait?, &first.name).alone();
        let call = queued_as(call, Some(entry)).shared(u64::from(first.options.max_depth));
        let call = waiting.iter().fold(call, |call, attempt| call.own(attempt.id_word()));
        Some(Arc::new(waiting.iter().fold(call, |call, attempt| call.own(attempt.owner_word()))))
    }

    /// A call for this attempt and its owner.
    fn call(&self, verb: &'static str) -> Call {
        let call = Call::new(self.kind.script, verb, &self.name).own(self.id_word());
        if self.kind.has_owner { call.own(self.owner_word()) } else { call }
    }

    fn owner_word(&self) -> Option<&Arc<str>> {
        self.owner.as_ref().map(|owner| &owner.0)
    }

    /// Only a node that has a vote may grant it.
    fn guarded(&self, call: Call) -> Arc<Call> {
        let is_guarded = self.origin.has_restart_guard;
        Arc::new(if is_guarded { call.shared(Word::Run).at_node(&self.name.node()) } else { call })
    }

    fn with_depth(&self, call: Call) -> Call {
        let depth = self.options.max_depth;
        if self.kind.has_owner {
            call.shared((depth != DEFAULT_MAX_DEPTH).then(|| u64::from(depth)))
        } else {
            call
        }
    }

    /// How many tokens it reserves, unless it is one.
    pub(super) fn reserved_tokens(&self) -> Option<u64> {
        self.reserved().filter(|_| self.options.fencing == Fencing::On).map(u64::from)
    }

    /// How long a new fencing counter is kept; `None` is the default.
    fn token_ttl(&self) -> Option<u64> {
        let span = self.options.token_ttl;
        (span != DEFAULT_TOKEN_TTL).then(|| millis(span))
    }
}

fn queued_as(call: Call, entry: Option<&QueueEntry>) -> Call {
    call.shared(entry.map(|entry| millis(entry.claim))).shared(entry.and_then(|entry| entry.channel.as_ref()))
}

/// Whole milliseconds, at least one.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).max(1)
}
