//! Sources of scripts, sent once where a server does not know their SHA1.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::batcher::{Batcher, SentFlag, TimedReply};
use super::script::PreparedCall;

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Sends the source of a script where its SHA1 is not known: after a restart or SCRIPT FLUSH,
/// 20,000 requests that are under way would else each send some kilobytes.
#[derive(Debug, Default)]
pub(super) struct ScriptLoader {
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
const MAX_WAITS: u32 = 8;

/// How long it waits for that each time, before it sends the source itself. The other request may
/// belong to a future that is not polled any more, and would keep all requests of its client
/// waiting.
const MAX_WAIT: Duration = Duration::from_millis(250);

impl ScriptLoader {
    pub(super) async fn run(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let mut turn = None;
        for _ in 0..MAX_WAITS {
            let seen = self.sent.load(Ordering::SeqCst);
            match batcher.send(call.by_sha1(), sent).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sent.load(Ordering::SeqCst) != seen {
                continue; // another request has sent one meanwhile
            }
            turn = LoadTurn::take(self, 0);
            if turn.is_none() {
                let sender = self.sender.load(Ordering::SeqCst);
                if timeout(MAX_WAIT, done).await.is_err() {
                    turn = LoadTurn::take(self, sender);
                }
            }
            if turn.is_some() {
                break;
            }
        }
        let answer = self.send_source(batcher, call, sent).await;
        drop(turn);
        answer
    }

    /// At once: those that are queued need it as well.
    async fn send_source(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let answer = batcher.send_at_once(call.by_source(), sent).await;
        self.sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// The same for one pipeline. Each script's source is sent once, and then the rest again by
    /// SHA1; between two commands of a pipeline another client may flush the scripts again, so what
    /// fails then goes by its source.
    pub(super) async fn run_all(
        &self,
        batcher: &Batcher,
        calls: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = batcher.send_all(calls.iter().map(PreparedCall::by_sha1).collect(), limit).await;
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
            for (index, answer) in unknown.into_iter().zip(batcher.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
        answers
    }
}

/// The right to send a source, until it is dropped or another request has taken it over.
struct LoadTurn<'a> {
    loader: &'a ScriptLoader,
    ticket: u64,
}

impl<'a> LoadTurn<'a> {
    /// Takes the turn from the request with this ticket, if that still has it.
    fn take(loader: &'a ScriptLoader, from: u64) -> Option<LoadTurn<'a>> {
        let ticket = loader.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        let taken = loader.sender.compare_exchange(from, ticket, Ordering::SeqCst, Ordering::SeqCst);
        taken.is_ok().then_some(LoadTurn { loader, ticket })
    }
}

impl Drop for LoadTurn<'_> {
    fn drop(&mut self) {
        let _taken_over =
            self.loader.sender.compare_exchange(self.ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        self.loader.done.notify_waiters();
    }
}
