//! [`Owner`].

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::shorten::shortened;

/// The longest owner, in bytes.
const LONGEST: usize = 256;

/// Who holds a lock that may be held more than once.
///
/// A task has no identity that another part of the same call chain could ask for, so identity is a
/// value: make one where the work begins and pass it down. It crosses `spawn`, processes and services
/// as text or through serde; whoever has it, is the owner. So make one for each call chain, never one for a
/// process: its tasks would all be inside at a time.
///
/// **What it does not promise**: secrecy. Whoever may read the lock's key sees the owner, and whoever
/// knows the owner may enter.
///
/// ```
/// use redlatch::Owner;
/// let owner = Owner::new();
/// let elsewhere: Owner = owner.to_string().parse()?;
/// assert_eq!(owner, elsewhere);
/// // Knowing an owner is the right to enter: `Debug` shows the start of it, `Display` all.
/// assert!(!format!("{owner:?}").contains(&owner.to_string()));
/// # Ok::<(), redlatch::OwnerError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Owner(Word);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Word {
    Uuid(Uuid),
    /// Of another library.
    Other(Arc<str>),
}

impl Owner {
    /// An owner that nobody else is: 122 random bits.
    #[expect(clippy::new_without_default, reason = "a default that differs each time would surprise")]
    pub fn new() -> Owner {
        Owner(Word::Uuid(Uuid::new_v4()))
    }

    /// The owner that another library or program names by this word, like Redisson's
    /// `8743c9c0-…:1`. The other side must make words that nobody can guess or repeat.
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
    /// - [`OwnerError`]: the protocol does not allow the word. It has 1 to 256 bytes, no space, no `:` in front, and is not
    ///   `mode`. The same UUID in other letters or without hyphens is another owner, as it is to
    ///   the server.
    pub fn from_word(word: &str) -> Result<Owner, OwnerError> {
        let error = || OwnerError { text: word.chars().take(64).collect() };
        if let Some(uuid) = Uuid::try_parse(word).ok().filter(|uuid| uuid.to_string() == word) {
            return Ok(Owner(Word::Uuid(uuid)));
        }
        let is_allowed = (1..=LONGEST).contains(&word.len())
            && !word.contains(' ')
            && !word.starts_with(':')
            && word != "mode";
        if is_allowed { Ok(Owner(Word::Other(word.into()))) } else { Err(error()) }
    }
}

impl From<Uuid> for Owner {
    /// For programs that have an identity already. It must be one that nobody can guess or repeat.
    fn from(uuid: Uuid) -> Owner {
        Owner(Word::Uuid(uuid))
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
    /// The first characters: enough to tell owners apart in a log, too little to enter a lock with.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:?})", shortened(&self.to_string()))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Word::Uuid(uuid) => uuid.fmt(f),
            Word::Other(word) => f.write_str(word),
        }
    }
}

impl FromStr for Owner {
    type Err = OwnerError;

    /// As [`Owner::from_word`].
    fn from_str(text: &str) -> Result<Owner, OwnerError> {
        Owner::from_word(text)
    }
}

/// The text is not an [`Owner`]: see [`Owner::from_word`].
///
/// It may be an owner with a space too many, so `Debug` shows only the start of it.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an owner: an owner has 1 to 256 bytes, no space, no colon in front, and is not \"mode\""
)]
pub struct OwnerError {
    text: String,
}

impl fmt::Debug for OwnerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerError").field("text", &shortened(&self.text)).finish()
    }
}
