//! [`Ticket`]: a hold on its way from one guard to the next.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::fencing::FencingToken;
use crate::owner::Owner;
use crate::shorten::shortened;

/// The longest attempt, in bytes: the scripts accept no more.
const LONGEST_ATTEMPT: usize = 128;

/// A grant reserves at most 1,000.
const MOST_SPARE_TOKENS: u32 = 999;

/// A hold without a guard, on its way to another task, process or service.
///
/// A guard becomes a ticket by `into_ticket`, for instance
/// [`MutexGuard::into_ticket`](crate::MutexGuard::into_ticket). From then on no task renews the
/// hold: it ends with its TTL, unless a lock of the same name and kind adopts it before, as
/// [`Mutex::adopt`](crate::Mutex::adopt) does. The guide has the whole way: [across
/// services](crate::guide::across_services).
///
/// It crosses processes through serde, in a format that names its fields, such as JSON: a field
/// without a value is left out. What it is read from is checked: an error names the field.
///
/// ```
/// let text = r#"{"name": "job", "kind": "mutex", "attempt": "5dc1d9c1f36b", "left_ms": 29000}"#;
/// let ticket: redlatch::Ticket = serde_json::from_str(text)?;
/// assert_eq!((ticket.name(), ticket.kind()), ("job", "mutex"));
/// // A program that knows the attempt can adopt the hold: `Debug` shows only its start.
/// assert!(!format!("{ticket:?}").contains("5dc1d9c1f36b"));
///
/// let wrong = serde_json::from_str::<redlatch::Ticket>(&text.replace("mutex", "latch"));
/// assert!(wrong.unwrap_err().to_string().contains("`kind`"));
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// **What it promises**: of several tasks that adopt one ticket, at most one succeeds.
///
/// **What it does not**: prove where it comes from. Its reader believes the kind and the token that
/// it names, so accept tickets from your own services only, as you accept an [`Owner`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct Ticket {
    pub(crate) name: String,
    pub(crate) kind: Cow<'static, str>,
    pub(crate) attempt: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<Owner>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<FencingToken>,
    /// How many tokens after that one are reserved for the hold.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) spare_tokens: u32,
    pub(crate) left_ms: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Ticket {
    /// Returns the name of the lock, without its client's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kind of the hold: `mutex`, `reentrant`, `read` or `write`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the owner of the hold; `None` of a mutex.
    #[must_use]
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Returns the fencing token of the hold, which adopting does not change.
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.token
    }

    /// Returns for how long the lease was still valid when the ticket was made: the time in which
    /// it must be adopted. It does not shrink: clocks of two machines cannot be compared.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        Duration::from_millis(self.left_ms)
    }
}

/// Shows only the start of the attempt and of the owner: with them, a program can adopt the hold.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("attempt", &shortened(&self.attempt))
            .field("owner", &self.owner)
            .field("token", &self.token)
            .field("left_ms", &self.left_ms)
            .finish()
    }
}

/// A ticket as it is read, before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    name: String,
    kind: String,
    attempt: String,
    owner: Option<String>,
    token: Option<u64>,
    #[serde(default)]
    spare_tokens: u32,
    left_ms: u64,
}

/// A field of a ticket that breaks its rule.
#[derive(Debug, thiserror::Error)]
#[error("the field `{field}` of a ticket {rule}")]
struct TicketError {
    field: &'static str,
    rule: &'static str,
}

impl TryFrom<Fields> for Ticket {
    type Error = TicketError;

    fn try_from(fields: Fields) -> Result<Ticket, TicketError> {
        let Fields { name, kind, attempt, owner, token, spare_tokens, left_ms } = fields;
        let wrong = |field, rule| Err(TicketError { field, rule });
        if name.is_empty() {
            return wrong("name", "is empty");
        }
        let Some(kind) = ["mutex", "reentrant", "read", "write"].into_iter().find(|known| *known == kind)
        else {
            return wrong("kind", "is none of mutex, reentrant, read and write");
        };
        if !(1..=LONGEST_ATTEMPT).contains(&attempt.len()) || attempt.contains(' ') {
            return wrong("attempt", "has 1 to 128 bytes and no space");
        }
        if owner.is_some() == (kind == "mutex") {
            return wrong("owner", "is missing for a mutex, and only for a mutex");
        }
        let Ok(owner) = owner.map(|word| word.parse::<Owner>()).transpose() else {
            return wrong("owner", "has 1 to 256 bytes, no space, no leading colon, and is not \"mode\"");
        };
        let has_token = token.is_none_or(|token| (1..FencingToken::LIMIT).contains(&token));
        let token = token.and_then(FencingToken::new);
        if !has_token {
            return wrong("token", "is from 1 to 2^53 - 1");
        }
        if spare_tokens > MOST_SPARE_TOKENS || token.is_none() && spare_tokens > 0 {
            return wrong("spare_tokens", "is at most 999, and 0 without a token");
        }
        Ok(Ticket { name, kind: Cow::Borrowed(kind), attempt, owner, token, spare_tokens, left_ms })
    }
}

/// A guard that could not become a [`Ticket`], and why: its lease had ended, or other tasks of this
/// client use the same hold ([`Error::SharedHold`]).
///
/// The guard is as it was; dropped with this error, it releases its hold.
pub struct IntoTicketError<G>(Box<(G, Error)>);

impl<G> IntoTicketError<G> {
    pub(crate) fn new(guard: G, error: Error) -> IntoTicketError<G> {
        IntoTicketError(Box::new((guard, error)))
    }

    pub(crate) fn map<H>(self, guard: impl FnOnce(G) -> H) -> IntoTicketError<H> {
        let (inner, error) = *self.0;
        IntoTicketError::new(guard(inner), error)
    }

    /// Returns why.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.0.1
    }

    /// Returns the guard.
    #[must_use]
    pub fn into_guard(self) -> G {
        self.0.0
    }
}

impl<G> From<IntoTicketError<G>> for Error {
    /// Drops the guard, which releases its hold in the background.
    fn from(error: IntoTicketError<G>) -> Error {
        error.0.1
    }
}

impl<G> StdError for IntoTicketError<G> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error().source()
    }
}

impl<G> fmt::Display for IntoTicketError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl<G> fmt::Debug for IntoTicketError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.error(), f)
    }
}
