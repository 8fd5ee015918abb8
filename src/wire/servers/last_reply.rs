//! [`LastReply`]: whether a server is silent, or a request only waits behind others.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::RedisError;
use tokio::sync::SetOnce;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

/// How often a busy runtime's other tasks run before an expired timer is believed: one of those
/// tasks reads from the connection.
const YIELDS: u32 = 3;

/// When a connection last delivered a reply. Requests on one connection are answered in order, so
/// each reply says that the server works on the requests before the others.
pub(super) struct LastReply {
    start: Instant,
    /// In nanoseconds since `start`; 0 before the first reply.
    after: AtomicU64,
    /// Why no further request is written to the connection.
    pub(super) failure: SetOnce<RedisError>,
}

impl LastReply {
    pub(super) fn new() -> LastReply {
        LastReply { start: Instant::now(), after: AtomicU64::new(0), failure: SetOnce::new() }
    }

    pub(super) fn note(&self) {
        let after = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.after.fetch_max(after, Ordering::Relaxed);
    }

    pub(super) fn at(&self) -> Instant {
        self.start + Duration::from_nanos(self.after.load(Ordering::Relaxed))
    }

    pub(super) fn is_within(&self, limit: Duration) -> bool {
        self.after.load(Ordering::Relaxed) > 0 && self.at().elapsed() < limit && !self.has_failed()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Writes a request and waits for its reply. `None`: no request was answered for `limit`, so
    /// the server is silent.
    pub(super) async fn unless_silent<T>(
        &self,
        limit: Duration,
        mut request: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let mut since = Instant::now();
        loop {
            if let Ok(answer) = timeout_at(since + limit, request.as_mut()).await {
                self.note();
                return Some(answer);
            }
            // With very many tasks, the task that reads from the connection may itself be late.
            for _ in 0..YIELDS {
                yield_now().await;
            }
            if self.at() <= since {
                let answer = timeout(Duration::ZERO, request.as_mut()).await.ok();
                if answer.is_some() {
                    self.note();
                }
                return answer;
            }
            since = self.at();
        }
    }
}
