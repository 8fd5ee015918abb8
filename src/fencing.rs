//! [`FencingToken`]: a number that grows with each exclusive lease.

use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// A number that only grows: each exclusive lease on a lock has a larger one than all before.
///
/// Send it with every write to the resource that the lock protects, and let the resource refuse a
/// token smaller than the largest it has seen. Then a holder that was paused past its lease cannot
/// overwrite what its successor wrote, however wrong the clocks are ([Kleppmann
/// 2016](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)).
///
/// A lease to read has the token of the last writer. It has a larger one of its own:
/// - on one server, if its client has connected since, or if no write lease was granted for ten
///   seconds;
/// - in a cluster, behind Sentinel and on a [quorum](crate::LocksBuilder::quorum), always.
///
/// The resource should refuse a reader's request if its token is smaller than the last writer's. It
/// should not remember a reader's token, since other readers may have smaller ones.
///
/// Tokens are below 2^53, so they survive JavaScript, Lua, JSON, and an `i64` of SQL. A renewal
/// keeps the token.
///
/// A further hold of the same owner has the same token, with two exceptions. In these it has a
/// larger token, and the resource refuses the first one from then on:
/// - a hold to write inside one to read;
/// - a quorum in which no majority of the nodes knows the first token any more.
///
/// **What it does not**: promise consecutive numbers. After a restart, an expiry of the counter
/// ([`Options::token_ttl`](crate::Options::token_ttl)) or a failover, tokens continue from the
/// server's clock in microseconds. They could only repeat if the counter were lost *and* the
/// server's clock stepped back behind what this client has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// Tokens and times are below this, so that Lua and JavaScript have them exactly.
    pub(crate) const LIMIT: u64 = 1 << 53;

    /// Returns a token that was stored or sent, such as `REDLATCH_TOKEN` of `redlatch run`. `None`
    /// if no lease has it: 0, or 2^53 and above.
    ///
    /// ```
    /// # use redlatch::FencingToken;
    /// let token = "1795577720965992".parse().ok().and_then(FencingToken::new);
    /// assert_eq!(token.unwrap().get(), 1_795_577_720_965_992);
    /// ```
    #[must_use]
    pub fn new(token: u64) -> Option<FencingToken> {
        NonZeroU64::new(token).filter(|token| token.get() < FencingToken::LIMIT).map(FencingToken)
    }

    /// Returns the number, to store or to send.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
