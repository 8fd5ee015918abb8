//! [`Ability`]: what a server is able to do, and lacks in an outage.

/// What a server is able to do, each with all before it. An outage is the lack of one, and ends
/// once a request shows it: a full server still releases, and a busy lock of a server that refuses
/// writes is still found busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ability {
    /// It replies, and runs scripts.
    Reply,
    Write,
    /// Its memory has room for a lock.
    Store,
    /// So many replicas confirm what was written.
    Replicate(u32),
}
