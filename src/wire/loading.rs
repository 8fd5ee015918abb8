//! Sources of scripts, sent once where a server does not know their SHA1.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::crowd::{Answered, Crowd, SentFlag};
use super::script::Filled;

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Sends the source of a script where its SHA1 is not known: after a restart or SCRIPT FLUSH,
/// 20,000 requests that are under way would else each send some kilobytes.
#[derive(Debug, Default)]
pub(super) struct Loading {
    tickets: AtomicU64,
    /// The ticket of the request that is sending a source; 0 if none is.
    sender: AtomicU64,
    /// How often a source was sent.
    sent: AtomicU64,
    /// Notified when the sender is done.
    done: Notify,
}

/// How often a request waits for another one to send a source: about the number of scripts. A
/// cluster has several servers that may not know them.
const TURNS: u32 = 8;

/// How long it waits for that each time, before it sends the source itself. The other request may
/// belong to a future that is not polled any more, and would keep all requests of its client
/// waiting.
const TURN: Duration = Duration::from_millis(250);

impl Loading {
    pub(super) async fn run(
        &self,
        crowd: &Crowd,
        call: &Filled<'_>,
        sent: &SentFlag,
    ) -> Result<Answered, RedisError> {
        let mut turn = None;
        for _ in 0..TURNS {
            let seen = self.sent.load(Ordering::SeqCst);
            match crowd.send(call.by_sha1(), sent).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sent.load(Ordering::SeqCst) != seen {
                continue; // another request has sent one meanwhile
            }
            turn = Turn::take(self, 0);
            if turn.is_none() {
                let sender = self.sender.load(Ordering::SeqCst);
                if timeout(TURN, done).await.is_err() {
                    turn = Turn::take(self, sender);
                }
            }
            if turn.is_some() {
                break;
            }
        }
        let answer = self.send_source(crowd, call, sent).await;
        drop(turn);
        answer
    }

    /// At once: those that are queued need it as well.
    async fn send_source(
        &self,
        crowd: &Crowd,
        call: &Filled<'_>,
        sent: &SentFlag,
    ) -> Result<Answered, RedisError> {
        let answer = crowd.send_at_once(call.by_source(), sent).await;
        self.sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// The same for one pipeline. Each script's source is sent once, and then the rest again by
    /// SHA1; between two commands of a pipeline another client may flush the scripts again, so what
    /// fails then goes by its source.
    pub(super) async fn run_all(
        &self,
        crowd: &Crowd,
        calls: &[Filled<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = crowd.send_all(calls.iter().map(Filled::by_sha1).collect(), limit).await;
        for by_source in [false, true] {
            let unknown: Vec<usize> = (0..answers.len())
                .filter(|&index| answers[index].as_ref().is_err_and(is_unknown_script))
                .collect();
            if unknown.is_empty() {
                break;
            }
            let mut sources = HashSet::new();
            let again = unknown.iter().map(|&index| {
                let call = &calls[index];
                if sources.insert(call.call.script().name()) || by_source {
                    call.by_source()
                } else {
                    call.by_sha1()
                }
            });
            let again = again.collect();
            for (index, answer) in unknown.into_iter().zip(crowd.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
        answers
    }
}

/// The right to send a source, until it is dropped or another request has taken it over.
struct Turn<'a> {
    loading: &'a Loading,
    ticket: u64,
}

impl<'a> Turn<'a> {
    /// Takes the turn from the request with this ticket, if that still has it.
    fn take(loading: &'a Loading, from: u64) -> Option<Turn<'a>> {
        let ticket = loading.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        let taken = loading.sender.compare_exchange(from, ticket, Ordering::SeqCst, Ordering::SeqCst);
        taken.is_ok().then_some(Turn { loading, ticket })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _taken_over =
            self.loading.sender.compare_exchange(self.ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        self.loading.done.notify_waiters();
    }
}
