//! Which companion key of a lock made a script fail, if one did: its fencing counter or its queue
//! may hold what another program wrote.

use std::time::Duration;

use redis::{RedisError, Value};

use super::failure::Failure;
use super::script::Call;
use super::servers::Connection;

/// The largest token, and one more.
const LARGEST: i64 = 1 << 53;

/// The failure of a call, with the companion key that caused it, if one did.
pub(super) async fn find_spoilt_key(
    connection: &Connection,
    call: &Call,
    limit: Duration,
    failure: Failure,
) -> Failure {
    let is_suspect = failure.error_reply().is_some_and(may_be_spoilt);
    let Some(lock) = call.lock.as_ref().filter(|_| is_suspect) else { return failure };
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
        Some(number) if number >= LARGEST - 1 => Some("has reached 2^53"),
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
