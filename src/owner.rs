//! [`Owner`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

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
/// # Ok::<(), redlatch::OwnerError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Owner(Uuid);

impl Owner {
    /// An owner that nobody else is: 122 random bits.
    #[expect(clippy::new_without_default, reason = "a default that differs each time would surprise")]
    pub fn new() -> Owner {
        Owner(Uuid::new_v4())
    }
}

impl From<Uuid> for Owner {
    /// For programs that have an identity already. It must be one that nobody can guess or repeat.
    fn from(uuid: Uuid) -> Owner {
        Owner(uuid)
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

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Owner {
    type Err = OwnerError;

    fn from_str(text: &str) -> Result<Owner, OwnerError> {
        let owner = Uuid::try_parse(text).map(Owner).ok();
        // In any other form it would be another owner to the server.
        owner.filter(|owner| owner.to_string() == text).ok_or_else(|| OwnerError { text: text.to_owned() })
    }
}

/// The text is not an [`Owner`]: it must be a UUID in small letters, with hyphens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an owner: an owner is a UUID in small letters, with hyphens")]
pub struct OwnerError {
    text: String,
}
