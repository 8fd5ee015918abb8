//! [`Name`]: names of locks, and the keys that they stand for.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The longest name, in bytes.
const LONGEST: usize = 512;

/// Suffixes of a lock's companion keys.
const FENCE: &str = "fence";
const WAITERS: &str = "waiters";

/// The end of the key at which a node of a guarded quorum stores its admission; the prefix precedes
/// it.
const NODE: &str = "{}node";

/// The name of a lock, checked, with its keys. Cheap to clone.
///
/// The lock itself is at exactly `prefix + name`, where operators and other libraries find it. Its
/// companion keys are in the same hash slot of a cluster: at `key:suffix` if the key has a [hash
/// tag](https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags), else
/// at `{key}:suffix`.
#[derive(Clone)]
pub struct Name(Arc<Keys>);

/// The keys, in one text: a client may hold very many locks.
struct Keys {
    /// The fencing counter's key, which contains the lock's, and then the queue's.
    text: Box<str>,
    /// Where the lock's key begins: behind the brace that makes it a hash tag.
    lock: u16,
    /// Where the name begins, behind the prefix.
    name: u16,
    /// Where the lock's key ends.
    end: u16,
    /// Where the fencing counter's key ends.
    waiters: u16,
}

impl Name {
    pub(crate) fn new(prefix: &str, name: &str) -> Result<Name, NameError> {
        let problem = |problem| NameError { name: name.chars().take(64).collect(), problem };
        if name.is_empty() {
            return Err(problem(NameProblem::Empty));
        }
        if name.len() > LONGEST {
            return Err(problem(NameProblem::TooLong { bytes: name.len() }));
        }
        let lock = format!("{prefix}{name}");
        let tagged = hash_tag(&lock).is_some();
        if !tagged && lock.contains('}') {
            return Err(problem(NameProblem::BrokenHashTag));
        }
        // Two kinds of tagged keys collide with other locks: `{a}:fence` is the fencing counter of
        // the lock `a`, and a lock `{a}` would share its companion keys with `a`.
        let is_tag = lock.starts_with('{') && lock.find('}') == Some(lock.len() - 1);
        if tagged && (is_tag || belongs_to_another(&lock) || lock.ends_with(NODE)) {
            return Err(problem(NameProblem::Reserved));
        }
        let (open, close) = if tagged { ("", "") } else { ("{", "}") };
        let text = format!("{open}{lock}{close}:{FENCE}{open}{lock}{close}:{WAITERS}").into_boxed_str();
        // A name has at most 512 bytes, a prefix 128: both are far shorter than 64 KB.
        let place = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX);
        let (start, end) = (open.len(), open.len() + lock.len());
        let waiters = end + close.len() + 1 + FENCE.len();
        let (lock, name) = (place(start), place(start + prefix.len()));
        Ok(Name(Arc::new(Keys { text, lock, name, end: place(end), waiters: place(waiters) })))
    }

    /// Returns the name as it was given, without the prefix.
    pub fn as_str(&self) -> &str {
        &self.0.text[self.0.name as usize..self.0.end as usize]
    }

    /// Returns the lock's key.
    pub fn key(&self) -> &str {
        &self.0.text[self.0.lock as usize..self.0.end as usize]
    }

    pub(crate) fn fence(&self) -> &str {
        &self.0.text[..self.0.waiters as usize]
    }

    pub(crate) fn waiters(&self) -> &str {
        &self.0.text[self.0.waiters as usize..]
    }

    /// Returns the key of a guarded quorum's node. No lock can have it, since it is no valid name.
    pub(crate) fn node(&self) -> String {
        node_key(&self.0.text[self.0.lock as usize..self.0.name as usize])
    }
}

/// Returns the key at which a node of a guarded quorum stores its admission.
pub(crate) fn node_key(prefix: &str) -> String {
    format!("{prefix}{NODE}")
}

/// Two names are equal if they stand for the same key.
impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({:?})", self.key())
    }
}

/// Returns the hash tag, which Redis hashes instead of the whole key: the bytes between the first
/// `{` and the first `}` after it. `None` if there are none.
fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

fn belongs_to_another(key: &str) -> bool {
    let Some((front, last)) = key.rsplit_once(':') else { return false };
    [FENCE, WAITERS].contains(&last) && hash_tag(front).is_some()
}

/// The text is not a valid lock name.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a lock name: {problem}")]
pub struct NameError {
    /// At most its first 64 characters, so that it can be printed.
    name: String,
    problem: NameProblem,
}

impl NameError {
    /// Returns which rule the name breaks.
    pub fn problem(&self) -> &NameProblem {
        &self.problem
    }
}

/// The sentence: what `main` prints if it returns an error.
impl fmt::Debug for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The rules for names.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameProblem {
    /// It is empty.
    #[error("it is empty")]
    Empty,
    /// It has more than 512 bytes.
    #[error("it has {bytes} bytes, more than {LONGEST}")]
    TooLong {
        /// The number of bytes.
        bytes: usize,
    },
    /// It has a `}` but no hash tag: the lock's companion keys could not be in its slot of a
    /// cluster.
    #[error("it has a `}}` but no hash tag before it, like `{{tag}}`")]
    BrokenHashTag,
    /// It is a key that belongs to another lock, like `{a}:fence`, or shares that lock's companion
    /// keys, like `{a}` those of `a`.
    #[error("it is, or shares, a key that belongs to another lock")]
    Reserved,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(name: &str) -> Option<NameProblem> {
        Name::new("", name).err().map(|error| error.problem)
    }

    #[test]
    fn companions_share_the_slot_of_the_lock() {
        for key in ["plain", "a b", "tag:{x}", "{x}y", "{x}}y", "open{", "{", "x{y}z{w}", "\n\0🔒"] {
            let name = Name::new("", key).unwrap();
            let slot = |key: &str| hash_tag(key).unwrap_or(key).to_owned();
            for companion in [name.fence(), name.waiters()] {
                assert_eq!(slot(companion), slot(name.key()), "{companion:?} beside {key:?}");
            }
        }
    }

    #[test]
    fn names_with_companions_in_another_slot_are_refused() {
        assert_eq!(problem(""), Some(NameProblem::Empty));
        assert_eq!(problem(&"x".repeat(513)), Some(NameProblem::TooLong { bytes: 513 }));
        assert_eq!(problem(&"x".repeat(512)), None);
        for name in ["}", "a}b", "{}", "{}{a}", "}{"] {
            assert_eq!(problem(name), Some(NameProblem::BrokenHashTag), "{name}");
        }
    }

    #[test]
    fn names_of_companions_are_refused() {
        for name in ["{a}", "{a}:fence", "x{a}y:waiters", "{a}{}node", "x{a}y{}node"] {
            assert_eq!(problem(name), Some(NameProblem::Reserved), "{name}");
        }
        for name in ["a:fence", "{a}fence", "{a}:fences", "fence:{a}", "{a}:ended"] {
            assert_eq!(problem(name), None, "{name}");
        }
    }

    #[test]
    fn a_name_is_shown_without_its_prefix() {
        let name = Name::new("lock:", "backup").unwrap();
        assert_eq!((name.as_str(), name.key()), ("backup", "lock:backup"));
        assert_eq!((name.fence(), name.waiters()), ("{lock:backup}:fence", "{lock:backup}:waiters"));
        assert_eq!(name.node(), "lock:{}node");
        let tagged = Name::new("lock:", "{a}b").unwrap();
        assert_eq!((tagged.as_str(), tagged.key()), ("{a}b", "lock:{a}b"));
        assert_eq!((tagged.fence(), tagged.waiters()), ("lock:{a}b:fence", "lock:{a}b:waiters"));
    }
}
