//! How the requests to a cluster follow their slots from server to server.

use std::pin::Pin;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::super::error_replies::{too_slow, was_redirected};
use super::super::request::{PreparedCall, TimedReply};
use super::masters::Masters;
use super::sending::{SentFlag, last};

/// The first and the longest pause before a request follows its slot once more.
const REDIRECT_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

impl Masters {
    /// Sends a call, and follows its slot from server to server until one of them runs it. Waits
    /// for the reply for as long as the server replies to any request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the call may still run if it was written; `sent_flag` says whether it was.
    pub(super) async fn send(
        self: &Arc<Masters>,
        call: &PreparedCall,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        self.follow(call.clone().with_slot(), Some(sent_flag), self.limit()).await
    }

    /// Without a `sent_flag`, the call is sent ahead of those that wait, and its reply is awaited
    /// until the limit; otherwise for as long as the server replies to any request.
    // Boxed: otherwise each request to a single server would have room for this future.
    fn follow<'a>(
        self: &'a Arc<Masters>,
        mut call: PreparedCall,
        sent_flag: Option<&'a SentFlag>,
        limit: Duration,
    ) -> Pin<Box<dyn Future<Output = Result<TimedReply, RedisError>> + Send + 'a>> {
        Box::pin(async move {
            let deadline = Instant::now() + limit;
            let mut pause = Duration::ZERO;
            loop {
                let mut outcome = match sent_flag {
                    Some(sent_flag) => self.send_once(&call, sent_flag, deadline).await,
                    None => self.send_ahead_once(slice::from_ref(&call), deadline).await.and_then(last),
                };
                // While the slot moves, its server names the one that has the keys already.
                if let Err(error) = &outcome
                    && let Some(target) = target(error, ServerErrorKind::Ask)
                {
                    outcome = self.ask(&call, target, deadline).await;
                }
                let error = match outcome {
                    Err(error) if was_redirected(&error) => error,
                    outcome => return outcome,
                };
                // While a slot moves, a call for many locks is refused for as long as one server
                // has some of their keys and another one the rest.
                call.is_alone = true;
                if let Some(target) = target(&error, ServerErrorKind::Moved) {
                    self.moved(call.slot, target);
                }
                if Instant::now() + pause >= deadline {
                    return Err(error);
                }
                // The first time at once: it is known where the slot is now.
                sleep(pause).await;
                pause = (pause * 2).clamp(REDIRECT_PAUSES.0, REDIRECT_PAUSES.1);
            }
        })
    }

    /// Sends requests: those for each master together, ahead of other requests to it. What a busy
    /// client asks of a master must not delay the renewals there.
    ///
    /// What a master refuses because a slot moves is sent again alone, without waiting for all
    /// masters: one that hangs would delay the first renewals of all.
    pub(super) async fn send_ahead(
        self: &Arc<Masters>,
        requests: Vec<PreparedCall>,
        limit: Duration,
    ) -> Vec<Result<TimedReply, RedisError>> {
        let requests: Vec<_> = requests.into_iter().map(PreparedCall::with_slot).collect();
        let limit = limit.min(self.limit());
        let mut answers: Vec<_> = requests.iter().map(|_| Err(too_slow())).collect();
        let (mut together, mut alone) = (JoinSet::new(), JoinSet::new());
        for places in self.by_master(&requests) {
            let masters = Arc::clone(self);
            let group: Vec<_> = places.iter().map(|place| requests[*place].clone()).collect();
            together.spawn(async move {
                let replies = masters.send_ahead_once(&group, Instant::now() + limit).await;
                let replies = replies.unwrap_or_else(|error| vec![Err(error); group.len()]);
                places.into_iter().zip(replies).collect::<Vec<_>>()
            });
        }
        loop {
            // A join fails only if the runtime shuts down.
            let (replies, were_together) = tokio::select! {
                Some(replied) = together.join_next() => (replied.unwrap_or_default(), true),
                Some(replied) = alone.join_next() => (replied.into_iter().collect(), false),
                else => return answers,
            };
            for (place, reply) in replies {
                if were_together && reply.as_ref().is_err_and(was_redirected) {
                    let (this, call) = (Arc::clone(self), requests[place].clone());
                    alone.spawn(async move { (place, this.follow(call, None, limit).await) });
                } else {
                    answers[place] = reply;
                }
            }
        }
    }
}

/// Where an error of this kind says that the slot is.
fn target(error: &RedisError, kind: ServerErrorKind) -> Option<(&str, u16)> {
    let (address, _slot) = error.redirect_node().filter(|_| error.kind() == ErrorKind::Server(kind))?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port.parse().ok()?))
}
