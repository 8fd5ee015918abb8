//! How requests are written to one connection, in one pipeline. [`SentFlag`]: whether one was
//! written.

use std::sync::atomic::{AtomicBool, Ordering};

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};

use super::super::error_replies::too_slow;
use super::super::request::{Batch, PreparedCall, TimedReply};
use super::last_reply::LastReply;
use crate::measure;

/// Whether a request of a call was written to a connection, and may have an effect.
#[derive(Debug, Default)]
pub(in crate::wire) struct SentFlag(AtomicBool);

impl SentFlag {
    pub(in crate::wire) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(in crate::wire) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Sends requests together, combined where they may be, until each is answered. Those that a server
/// did not serve go out in a further round; each round shows that the server is not silent.
pub(super) async fn send_calls(
    connection: &MultiplexedConnection,
    requests: &[PreparedCall],
    last_reply: &LastReply,
) -> Vec<Result<TimedReply, RedisError>> {
    let mut batch = Batch::new(requests);
    loop {
        let commands = batch.commands();
        if commands.is_empty() {
            return batch.replies();
        }
        let replies = pipeline(connection.clone(), commands).await;
        if replies.iter().any(Result::is_ok) {
            last_reply.note();
        }
        batch.record(replies);
    }
}

/// The reply to the last of some requests, or to the only one.
pub(super) fn last<T>(mut replies: Vec<Result<T, RedisError>>) -> Result<T, RedisError> {
    replies.pop().unwrap_or_else(|| Err(too_slow()))
}

/// Sends commands together, at least one, and returns a reply for each, even if the pipeline fails
/// as a whole.
pub(super) async fn pipeline(
    mut connection: MultiplexedConnection,
    requests: Vec<Cmd>,
) -> Vec<Result<Value, RedisError>> {
    if let [request] = requests.as_slice() {
        measure::sent(1);
        return vec![request.query_async(&mut connection).await];
    }
    let mut pipeline = Pipeline::with_capacity(requests.len());
    for request in requests {
        pipeline.add_command(request);
    }
    let count = pipeline.len();
    measure::sent(count);
    match pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(&mut connection).await {
        Ok(answers) if answers.len() == count => answers,
        Ok(answers) => {
            let detail = format!("{} for {count} requests", answers.len());
            let error =
                RedisError::from((ErrorKind::UnexpectedReturnType, "wrong number of answers", detail));
            vec![Err(error); count]
        }
        Err(error) => vec![Err(error); count],
    }
}
