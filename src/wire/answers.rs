//! The refusals of the scripts, by their numbers, as the headers in `lua/` specify them.
//!
//! -5 is missing: a word of the call is malformed. No code of this client expects that answer, and
//! it becomes [`Error::Reply`](crate::Error::Reply), as any other number outside the contract.

/// `acquire`, `read`, `write`: the attempt was ended, or comes after its `grant_before`.
pub(super) const LATE: i64 = -1;

/// All verbs but `wait`: the key holds something else. In answer to `renew` and `downgrade`, the
/// lock is lost.
pub(crate) const WRONG_TYPE: i64 = -2;

/// `acquire`, `read`, `write`, `release` by force, `inspect`: the key never expires, so another
/// program wrote it.
pub(crate) const NO_EXPIRY: i64 = -3;

/// `acquire`, `read`, `write` of kinds that may be re-entered: there are as many nested holds as
/// may be.
pub(crate) const TOO_DEEP: i64 = -4;

/// `write`: it is not queued, since its own reader and another one that waits to write would wait
/// for each other.
pub(crate) const WOULD_DEADLOCK: i64 = -6;

/// `read`: as many read or wait as may.
pub(crate) const FULL: i64 = -7;

/// `acquire`, `read`, `write` in a quorum: the first of two numbers. The second is an accepted
/// token that is at least as large as the proposed one.
pub(super) const TOO_LOW: i64 = -8;

/// `acquire`, `read`, `write` in a quorum with the restart guard: the node was not admitted since
/// it started.
pub(super) const NOT_ADMITTED: i64 = -9;

/// All verbs but `inspect`: the call has not served the lock, and no hold of it was changed.
pub(super) const NOT_SERVED: i64 = -10;
