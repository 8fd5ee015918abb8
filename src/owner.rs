//! [`Owner`]: the identity of a holder, passed down a call chain.

use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::shorten::shortened;

/// The longest owner, in bytes.
const LONGEST: usize = 256;

/// The owner of a lock that may be held more than once.
///
/// An async task has no identity that its call chain could query, so identity is a value: make one
/// where the work begins, and pass it down. It crosses `spawn`, processes and services as text or
/// through serde.
///
/// Every task that has it is the owner. So make one for each call chain, never one for a process:
/// all tasks of the process would hold the lock together.
///
/// **What it does not**: stay secret. A user that may read the lock's key sees the owner, and a
/// program that knows the owner can acquire the lock.
///
/// ```
/// use redlatch::Owner;
/// let owner = Owner::new();
/// let elsewhere: Owner = owner.to_string().parse()?;
/// assert_eq!(owner, elsewhere);
/// // A program that knows an owner can enter: `Debug` shows only its start, `Display` all of it.
/// assert!(!format!("{owner:?}").contains(&owner.to_string()));
/// # Ok::<(), redlatch::OwnerError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Owner(pub(crate) Arc<str>);

tokio::task_local! {
    static CURRENT: Owner;
}

impl Owner {
    /// The header in which services send each other the owner of a request: see [across
    /// services](crate::guide::across_services).
    pub const HEADER: &str = "lock-owner";

    /// Makes a unique owner: 122 random bits.
    #[expect(clippy::new_without_default, reason = "a default that differs each time would surprise")]
    pub fn new() -> Owner {
        Uuid::new_v4().into()
    }

    /// Makes an owner from the word with which another library or program names it, like Redisson's
    /// `8743c9c0-…:1`. The other program must choose words that cannot be guessed and do not
    /// repeat.
    ///
    /// ```
    /// use redlatch::Owner;
    /// let thread = Owner::from_word("8743c9c0-0795-4907-87fd-6c719a6b4586:61")?;
    /// assert!(Owner::from_word("two words").is_err());
    /// # let _ = thread;
    /// # Ok::<(), redlatch::OwnerError>(())
    /// ```
    ///
    /// # Errors
    /// - [`OwnerError`]: the protocol does not allow the word. It has 1 to 256 bytes, no space, no
    ///   leading `:`, and is not `mode`. The same UUID with other letter case or without hyphens is
    ///   another owner, as it is to the server.
    pub fn from_word(word: &str) -> Result<Owner, OwnerError> {
        let is_allowed = (1..=LONGEST).contains(&word.len())
            && !word.contains(' ')
            && !word.starts_with(':')
            && word != "mode";
        let error = || OwnerError { start: shortened(word), bytes: word.len() };
        is_allowed.then(|| Owner(word.into())).ok_or_else(error)
    }

    /// Runs `work` as this owner: inside it, also in the functions that it calls,
    /// [`current`](Owner::current) returns the owner, and
    /// [`Locks::reentrant_in_scope`](crate::Locks::reentrant_in_scope) and
    /// [`rwlock_in_scope`](crate::Locks::rwlock_in_scope) use it.
    ///
    /// **What it does not**: reach tasks that the work spawns. Give those the owner, in a scope of
    /// their own.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() {
    /// use redlatch::Owner;
    ///
    /// async fn bill() -> Option<Owner> {
    ///     Owner::current() // nothing was passed down
    /// }
    ///
    /// let owner = Owner::new();
    /// assert_eq!(owner.scope(bill()).await, Some(owner));
    /// assert_eq!(bill().await, None);
    /// # }
    /// ```
    pub fn scope<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        CURRENT.scope(self.clone(), work)
    }

    /// Returns the owner of the innermost [`scope`](Owner::scope) around the caller; `None` outside
    /// of scopes.
    pub fn current() -> Option<Owner> {
        CURRENT.try_with(Owner::clone).ok()
    }
}

impl From<Uuid> for Owner {
    /// Makes an owner from a program's own identity, which must not be guessable or repeated.
    fn from(uuid: Uuid) -> Owner {
        Owner(uuid.to_string().into())
    }
}

impl From<Owner> for String {
    fn from(owner: Owner) -> String {
        owner.to_string()
    }
}

impl TryFrom<String> for Owner {
    type Error = OwnerError;

    fn try_from(text: String) -> Result<Owner, OwnerError> {
        text.parse()
    }
}

impl fmt::Debug for Owner {
    /// Shows the first characters: they distinguish owners in a log, and acquire no lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:?})", shortened(&self.0))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Owner {
    type Err = OwnerError;

    /// Like [`Owner::from_word`].
    fn from_str(text: &str) -> Result<Owner, OwnerError> {
        Owner::from_word(text)
    }
}

/// The text is not an [`Owner`]: see [`Owner::from_word`].
///
/// It may be an owner with one space too many, so the error shows only its start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{start:?} ({bytes} bytes) is not an owner: an owner has 1 to 256 bytes, no space, no leading colon, and is not \"mode\""
)]
pub struct OwnerError {
    start: String,
    bytes: usize,
}
