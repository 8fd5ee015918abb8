//! [`FencingToken`].

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number that only grows, one for every lease granted on a lock; who only reads has that of the last writer, or a larger
/// one of his own: on one server if his client has connected since, or nobody has written for ten seconds; in a cluster,
/// behind sentinels and of a [quorum](crate::LocksBuilder::quorum) in any case.
///
/// Send it with every write to the resource that the lock protects, and let the resource refuse a
/// token smaller than the largest it has seen: then a holder that was paused past its lease cannot
/// overwrite what its successor wrote, however wrong the clocks are
/// ([Kleppmann 2016](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)).
///
/// What a reader asks for is to be refused if his token is smaller than the last writer's. The resource should not remember
/// a reader's: others who read beside him may have smaller ones.
///
/// Tokens are below 2^53, so they survive JavaScript, Lua, JSON, and an `i64` of SQL. A further
/// hold of the same owner has the same token, with two exceptions, in which it has a larger one, so
/// that a resource refuses the first one from then on: a hold to write inside one that is older
/// than [`Options::token_ttl`](crate::Options::token_ttl); and a quorum in which no majority of the
/// nodes knows the first token any more. A renewal keeps the token.
///
/// **What it does not promise**: consecutive numbers. After a restart, an expiry of the counter
/// ([`Options::token_ttl`](crate::Options::token_ttl)) or a failover, tokens go on from the
/// server's clock in microseconds. They could only repeat if the counter were lost *and* the
/// server's clock stepped back behind what this client has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(u64);

impl FencingToken {
    /// `None` for 0, which is how scripts say "without fencing".
    pub(crate) fn from_reply(token: u64) -> Option<FencingToken> {
        (token > 0).then_some(FencingToken(token))
    }

    /// The number itself, to store or to send.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
