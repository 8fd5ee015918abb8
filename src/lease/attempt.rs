//! [`Attempt`]: one try to get a lock, from its first request to the release of what it got.

use std::any::Any;
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use uuid::Uuid;

use super::kind::{Kind, WITHOUT_TTL};
use super::validity::trusted_span;
use crate::clock::Moment;
use crate::error::{Context, Error};
use crate::events::{Event, Observer};
use crate::fencing::FencingToken;
use crate::labels::Labels;
use crate::name::Name;
use crate::options::{Fencing, Options};
use crate::owner::Owner;
use crate::wire::answers::{NO_EXPIRY, WRONG_TYPE};
use crate::wire::{Answer, InFlight, Reply, Word};

/// The longest time for which a lock is kept for a waiter that it was granted to and that has not
/// sent a request since.
const CLAIM: Duration = Duration::from_secs(3);

/// How an attempt is queued. The same in each of its requests. Cheap to clone, and small: each
/// lease has a place for one, although few were queued.
pub(super) type QueueEntry = Arc<QueueTerms>;

pub(super) struct QueueTerms {
    /// How long a grant is kept for the attempt.
    pub(super) claim: Duration,
    /// Where a message reaches it, if it has subscribed.
    pub(super) channel: Option<Arc<str>>,
}

/// What all attempts of a client share.
#[derive(Debug)]
pub(crate) struct Origin {
    /// The label of the node that decides alone. `None` if several nodes decide: each has its own
    /// failure. Not the node: a lease outlives its client, and would keep the connections open.
    pub(super) server: Option<String>,
    /// Its nodes lose their votes when they restart.
    pub(super) has_restart_guard: bool,
    /// What the text of each attempt ends with: the [labels](crate::labels::Labels).
    pub(super) suffix: Arc<str>,
    pub(crate) observer: Arc<Observer>,
    /// The client's.
    pub(super) runtime: Handle,
    /// A lease may outlive it.
    pub(super) client: Weak<dyn Any + Send + Sync>,
}

impl Origin {
    /// Adds the server that decides alone, if one does.
    pub(super) fn on_server(&self, context: Context) -> Context {
        self.server.iter().fold(context, |context, server| context.on(server))
    }
}

/// One try to get a lock. Each of its requests carries its id, which makes the requests idempotent.
pub(crate) struct Attempt {
    pub(super) kind: &'static Kind,
    pub(super) name: Name,
    pub(super) options: Arc<Options>,
    /// `None`: the attempt itself.
    pub(super) owner: Option<Owner>,
    pub(super) id: Uuid,
    pub(super) origin: Arc<Origin>,
    /// Its requests whose effect is unknown.
    pub(super) in_flight: Arc<InFlight>,
    /// Its position in the queues, sent again to a node that has lost it.
    pub(super) queued_at: OnceLock<u64>,
    /// Also those of the attempts that it was converted to. `None`: its hold is not passed on.
    reserved: Option<Arc<ReservedTokens>>,
    /// When this client learned of its grant, if it is to hold the lock for at least some time.
    held_since: OnceLock<Moment>,
    /// When the last request was sent that has confirmed the hold of its grant; 0: none. A renewal
    /// also succeeds if the server has lost that hold and granted the lock to the attempt again.
    /// Tasks that pass the hold on share this.
    confirmed: AtomicU64,
    /// No guard has its hold: the last one has reported its release, and left it to others.
    is_idle: AtomicBool,
}

/// The tokens that an attempt reserves, if its hold may be passed on: one for each task.
struct ReservedTokens {
    count: u32,
    /// The last of them that was used; 0: none.
    last: AtomicU64,
    passes_left: AtomicU32,
}

impl Attempt {
    /// Without an owner, the attempt itself is the owner.
    pub(crate) fn new(
        origin: Arc<Origin>,
        kind: &'static Kind,
        name: Name,
        options: Arc<Options>,
        owner: Option<Owner>,
    ) -> Attempt {
        Attempt {
            kind,
            name,
            options,
            owner,
            id: Uuid::new_v4(),
            origin,
            in_flight: Arc::default(),
            queued_at: OnceLock::new(),
            reserved: None,
            held_since: OnceLock::new(),
            confirmed: AtomicU64::new(0),
            is_idle: AtomicBool::new(false),
        }
    }

    /// The same attempt, with tokens for as many tasks.
    pub(super) fn reserving(self, count: u32) -> Attempt {
        let tokens = || ReservedTokens { count, last: 0.into(), passes_left: (count - 1).into() };
        Attempt { reserved: (count > 1).then(|| Arc::new(tokens())), ..self }
    }

    /// How many tokens it reserves, if it is more than one.
    pub(super) fn reserved(&self) -> Option<u32> {
        self.reserved.as_ref().map(|reserved| reserved.count)
    }

    /// The same hold as another kind, with other options.
    pub(super) fn converted(&self, kind: &'static Kind, options: Arc<Options>) -> Attempt {
        Attempt {
            owner: self.owner.clone(),
            id: self.id,
            in_flight: Arc::clone(&self.in_flight),
            queued_at: self.queued_at.clone(),
            reserved: self.reserved.clone(),
            held_since: self.held_since.clone(),
            confirmed: self.confirmed.load(Ordering::Relaxed).into(),
            ..Attempt::new(Arc::clone(&self.origin), kind, self.name.clone(), options, None)
        }
    }

    /// Its id in a call.
    pub(super) fn id_word(&self) -> Word {
        Word::Id(self.id, Arc::clone(&self.origin.suffix))
    }

    /// A guard was dropped, and its hold left to other tasks: no request releases it now.
    pub(super) fn report_release(&self) {
        self.origin.observer.emit(|| Event::Released { lock: self.name.clone(), kind: self.kind.name });
    }

    /// Notes whether no guard has the hold.
    pub(super) fn note_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Ordering::Relaxed);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Relaxed)
    }

    /// The id and the labels of the client, as the server stores them.
    pub(super) fn text(&self) -> String {
        format!("{}{}", self.id.simple(), self.origin.suffix)
    }

    /// The owner as the server knows it.
    pub(super) fn owner(&self) -> Cow<'_, str> {
        self.owner.as_ref().map_or_else(|| self.text().into(), |owner| Cow::Borrowed(&*owner.0))
    }

    /// The client that the attempt belongs to, for logs.
    pub(super) fn holder(&self) -> Option<String> {
        Labels::of_attempt(&self.text()).joint_name()
    }

    /// How long the lock is kept for this attempt once it is granted while it waits.
    pub(super) fn claim(&self) -> Duration {
        self.options.ttl.min(CLAIM)
    }

    /// Records when it was queued first, on the server's clock.
    pub(super) fn note_queued(&self, time: u64) {
        self.queued_at.get_or_init(|| time);
    }

    /// It was granted the lock. The server did that before this: the hold lasts long enough if the
    /// time counts from here.
    pub(super) fn note_held(&self) {
        if self.options.minimum_hold().is_some() {
            self.held_since.get_or_init(Moment::now);
        }
    }

    /// It was granted the lock by a reply to this request, unless it had it before.
    pub(super) fn note_granted(&self, sent: Moment) {
        let _ = self.confirmed.compare_exchange(0, sent.as_nanos(), Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(super) fn note_confirmed(&self, sent: Moment) {
        self.confirmed.fetch_max(sent.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn confirmed(&self) -> Moment {
        Moment::from_nanos(self.confirmed.load(Ordering::Relaxed))
    }

    /// For how much longer the lock must stay held if this is released now. It has not held the
    /// lock before the first note.
    pub(super) fn must_hold(&self) -> Option<Duration> {
        let (least, since) = (self.options.minimum_hold()?, self.held_since.get()?);
        let held = Moment::now().since(*since).mul_f64(1.0 - self.options.drift);
        Some(least.saturating_sub(held)).filter(|left| !left.is_zero())
    }

    /// Whether this kind's script sends this refusal. Any other number is outside its contract:
    /// `LATE`, for instance, says that the attempt has ended, which a live one has not. Two never
    /// come here, since `wire` judges them: `LATE` of a request with a time limit, which came too
    /// late, and `NOT_ADMITTED`, the node has no vote.
    pub(super) fn may_refuse(&self, answer: i64) -> bool {
        matches!(answer, WRONG_TYPE | NO_EXPIRY)
            || self.kind.refusals.iter().any(|(number, _)| *number == answer)
    }

    /// The error for a refusal: two that every kind's script sends, and those of this kind.
    pub(crate) fn refusal(&self, answer: i64, context: Context) -> Option<Error> {
        match answer {
            WRONG_TYPE => Some(Error::WrongType { context, found: self.kind.found }),
            NO_EXPIRY => Some(Error::WrongType { context, found: WITHOUT_TTL }),
            _ => {
                let (_, error) = self.kind.refusals.iter().find(|(number, _)| *number == answer)?;
                Some(error(&self.options, context))
            }
        }
    }

    /// The error for a reply that is such a refusal.
    pub(super) fn refusal_in(&self, reply: &Reply, context: Context) -> Option<Error> {
        match reply.expected()? {
            Answer::Final(answer) => self.refusal(answer, context),
            Answer::Busy(..) | Answer::TooLow(_) => None,
        }
    }

    /// The token of a lease that it has now.
    pub(super) fn note_token(&self, token: Option<FencingToken>) {
        if let Some(reserved) = &self.reserved {
            reserved.last.store(token.map_or(0, FencingToken::get), Ordering::Relaxed);
        }
    }

    /// The last reserved token that was used, if several were reserved.
    pub(super) fn last_token(&self) -> Option<u64> {
        self.last_used().filter(|last| *last > 0)
    }

    /// How many of the reserved tokens follow the last one that was used.
    pub(super) fn spare_tokens(&self) -> u32 {
        self.reserved.as_ref().map_or(0, |reserved| reserved.passes_left.load(Ordering::Relaxed))
    }

    /// The last token that is reserved for a lease with this one: the counter is above it once the
    /// lock was granted to another attempt, or to this one again.
    pub(super) fn last_own_token(&self, token: Option<FencingToken>) -> Option<u64> {
        token.map(|token| token.get() + u64::from(self.spare_tokens()))
    }

    /// What a release says of the reserved tokens: the last one that was used; 0 if no task has
    /// learned of the grant, so that calls which are dropped use none.
    pub(super) fn last_used(&self) -> Option<u64> {
        let reserved = self.reserved.as_ref().filter(|_| self.options.fencing == Fencing::On)?;
        Some(reserved.last.load(Ordering::Relaxed))
    }

    /// Whether the next task that has the hold has a token of its own.
    pub(super) fn may_pass(&self) -> bool {
        let has_token = self.options.fencing == Fencing::Off || self.last_token().is_some();
        has_token && self.spare_tokens() > 0
    }

    /// The token of the next task that has the hold.
    pub(super) fn next_token(&self) -> Option<FencingToken> {
        self.reserved.as_ref()?.passes_left.fetch_sub(1, Ordering::Relaxed);
        self.last_token().and_then(|last| self.token(last + 1))
    }

    /// The token of a grant. A script may answer with a token although fencing is off.
    pub(super) fn token(&self, token: u64) -> Option<FencingToken> {
        match self.options.fencing {
            Fencing::On => FencingToken::new(token),
            Fencing::Off => None,
        }
    }

    pub(super) fn trusted_span(&self, ttl: Duration) -> Duration {
        trusted_span(ttl, self.options.drift)
    }
}
