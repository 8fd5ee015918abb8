//! Why a script failed at a lock: its fencing counter or its queue may hold what another program
//! wrote, or the user lacks a right.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use uuid::Uuid;

use super::failure::Failure;
use super::script::Call;
use super::servers::Connection;
use crate::error::lacks_unnamed_right;
use crate::fencing::FencingToken;
use crate::name::Name;

/// The failure of a call, with its cause: a companion key, or a right.
pub(super) async fn explain_failure(
    connection: &Connection,
    call: &Call,
    limit: Duration,
    failure: Failure,
) -> Failure {
    let (Some(lock), Some(error)) = (&call.lock, failure.error_reply()) else { return failure };
    if lacks_unnamed_right(error) {
        let missing = connection.query(&trial_of_rights(lock, call.is_read_only), limit).await;
        let missing: Vec<String> =
            missing.ok().and_then(|rights| redis::from_redis_value(rights).ok()).unwrap_or_default();
        return failure.because_of_rights(&missing);
    }
    if may_be_spoilt(error) { find_spoilt_key(connection, lock, limit, failure).await } else { failure }
}

/// Runs each command of the scripts once, or those that read. A server before Redis 7.2 does not
/// say which one it refused, and `ACL DRYRUN` is a right that users of locks do not have.
///
/// The key is a new one, in the slot of the lock and with the patterns of its queue.
pub(super) fn trial_of_rights(lock: &Name, is_read_only: bool) -> Cmd {
    let mut trial = redis::cmd("EVAL");
    let key = format!("{}:{}", lock.waiters(), Uuid::new_v4().simple());
    trial.arg(include_str!("rights.lua")).arg(1).arg(key).arg(i32::from(is_read_only));
    trial
}

async fn find_spoilt_key(connection: &Connection, lock: &Name, limit: Duration, failure: Failure) -> Failure {
    let (fence, waiters) = (lock.fence(), lock.waiters());
    let mut get = redis::cmd("GET");
    get.arg(fence);
    let problem = match connection.query(&get, limit).await {
        Ok(Value::BulkString(bytes)) => spoilt_number(&bytes),
        Err(error) if is_wrong_type(&error) => Some("is not a string"),
        _ => None,
    };
    if let Some(problem) = problem {
        return failure.because_of(fence, problem);
    }
    let mut count = redis::cmd("ZCOUNT");
    count.arg(waiters).arg(0).arg(0);
    match connection.query(&count, limit).await {
        Err(error) if is_wrong_type(&error) => failure.because_of(waiters, "is not a sorted set"),
        _ => failure,
    }
}

/// What is wrong with the last token, if anything is.
fn spoilt_number(bytes: &[u8]) -> Option<&'static str> {
    let number = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<i64>().ok());
    match number {
        None => Some("is not an integer"),
        Some(number) if number >= FencingToken::LIMIT.cast_signed() - 1 => Some("has reached 2^53"),
        Some(_) => None,
    }
}

/// Whether an error may come from a key with unexpected contents. Redis 6.2 wraps it into the
/// script's error.
fn may_be_spoilt(error: &RedisError) -> bool {
    let says = |text: &str| error.detail().is_some_and(|detail| detail.contains(text));
    is_wrong_type(error)
        || says("WRONGTYPE")
        || says("not an integer")
        || says("would overflow")
        || says("2^53")
        || says("user_script")
}

fn is_wrong_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}
