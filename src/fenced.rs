//! A write to Redis that is refused if a later lease has written: the resource's side of fencing.

use redis::aio::ConnectionLike;
use redis::{RedisResult, Script, ToRedisArgs};

use crate::fencing::FencingToken;

/// The script of [`set`], for a client of your own: `lua/fenced.lua`. Its header has the contract.
pub const SCRIPT: &str = include_str!("../lua/fenced.lua");

/// Sets `key` to `value` and returns true, unless a larger token has written under `token_key`:
/// then it changes nothing and returns false.
///
/// **What it promises**: a holder that was paused past its lease cannot overwrite what its
/// successor wrote, since comparing and writing are one step of the server.
///
/// **What it does not**: refuse a late write before the successor has written. Write something
/// under the token first, and then read what you will change: see [fencing](crate::guide::fencing).
/// Nor does it refuse an earlier write of the same token, or keep a time to live of `key`, or what
/// `key` holds of another type.
///
/// The words come in the order of the script, as in every language. Several keys may have one
/// `token_key`, which must neither expire nor be evicted: it has no time to live. In a cluster, all
/// need one hash tag, as here.
///
/// ```no_run
/// # async fn run(
/// #     locks: redlatch::Locks,
/// #     mut redis: redlatch::redis::aio::MultiplexedConnection,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use redlatch::fenced;
///
/// let guard = locks.mutex("report")?.lock().await?;
/// let token = guard.lease().fencing_token().ok_or("fencing is off")?;
/// if !fenced::set(&mut redis, "{report}:text", "{report}:token", token, "the text").await? {
///     return Err("a later holder has written".into());
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// - [`redis::RedisError`]: the server could not be reached, or refused the script. The write may
///   have taken effect. Send it again before you write anything else under this token: it would
///   replace a later value.
///
/// # Cancel safety
/// Not cancel safe: after a drop, the value may have been written or not.
pub async fn set(
    redis: &mut impl ConnectionLike,
    key: &str,
    token_key: &str,
    token: FencingToken,
    value: impl ToRedisArgs,
) -> RedisResult<bool> {
    Script::new(SCRIPT).key(key).key(token_key).arg(token.get()).arg(value).invoke_async(redis).await
}
