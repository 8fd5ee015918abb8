//! [`first_reply`]: asks one server after the other, without waiting for one that hangs.

use std::future::Future;
use std::time::Duration;

use redis::RedisError;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::slot_table::unserved;

/// The first success of several tries. More are begun after each failure and each pause.
pub(super) async fn first_reply<T: Send + 'static, F>(
    runtime: &Handle,
    mut tries: impl Iterator<Item = F>,
    at_once: usize,
    pause: Duration,
) -> Result<T, RedisError>
where
    F: Future<Output = Result<T, RedisError>> + Send + 'static,
{
    let (mut begun, mut failure) = (JoinSet::new(), unserved());
    let mut more = at_once;
    loop {
        for next in tries.by_ref().take(more) {
            begun.spawn_on(next, runtime);
        }
        more = match timeout(pause, begun.join_next()).await {
            Ok(Some(Ok(Ok(reply)))) => return Ok(reply),
            Ok(Some(Ok(Err(error)))) => {
                failure = error;
                1
            }
            Ok(Some(Err(error))) => {
                failure = std::io::Error::other(error).into();
                1
            }
            Ok(None) => return Err(failure), // all have failed
            Err(_) => at_once,
        };
    }
}
