//! The keys beside that of a lock: which of them makes a script fail.
//!
//! An error reply names no key. Where it may come from a key that holds something else than the
//! script takes it for, the keys are read, with commands that the scripts use as well.

use redis::{RedisError, Value};

use super::batcher::{Batcher, SentFlag, TimedReply};
use super::{Call, Failure};

/// The largest token, and one more.
const LARGEST: i64 = 1 << 53;

/// The failure of a call, which names the key that is to blame if one of them is.
pub(super) async fn examine(batcher: &Batcher, call: &Call<'_>, failure: Failure) -> Failure {
    let Some([fence, waiters]) =
        call.companions().filter(|_| failure.error_reply().is_some_and(may_be_corrupt))
    else {
        return failure;
    };
    let mut get = redis::cmd("GET");
    get.arg(fence);
    let only_reads = SentFlag::default();
    let problem = match batcher.send(get, &only_reads).await {
        Ok(TimedReply { value: Value::BulkString(bytes), .. }) => spoilt_number(&bytes),
        Err(error) if is_wrong_type(&error) => Some("is not a string"),
        _ => None,
    };
    if let Some(problem) = problem {
        return failure.because_of(fence, problem);
    }
    let mut count = redis::cmd("ZCOUNT");
    count.arg(waiters).arg(0).arg(0);
    match batcher.send(count, &only_reads).await {
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

/// Whether an error may come from a key with the wrong contents. Redis 6.2 wraps it into that of
/// the script.
fn may_be_corrupt(error: &RedisError) -> bool {
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
