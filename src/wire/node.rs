//! One Redis deployment that scripts are run on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::crowd::Crowd;
use super::link::{Connected, Link, is_spent};
use super::{Call, Dial, Failure, Reply};
use crate::clock::Moment;

/// How far the floor may lag behind the server's clock, in microseconds. Each raise sends the next
/// grant of every lock through the slower branch once.
const FLOOR_STEP: u64 = 10_000_000;

/// One deployment, reached through one shared connection.
#[derive(Debug)]
pub(crate) struct Node {
    link: Link,
    limit: Duration,
    floor: AtomicU64,
    outage: Mutex<Option<(Moment, Failure)>>,
    /// Whether there is an outage, so that nobody locks to find that there is none.
    fails: AtomicBool,
}

impl Node {
    pub(crate) fn new(dial: Dial, limit: Duration) -> Node {
        Node {
            link: Link::new(dial, limit),
            limit,
            floor: AtomicU64::new(0),
            outage: Mutex::new(None),
            fails: AtomicBool::new(false),
        }
    }

    /// The longest that one request takes.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Which connection this is. Server times from different ones must not be compared: there may be
    /// another server behind the address.
    pub(crate) fn generation(&self) -> u64 {
        self.link.generation()
    }

    /// The latest server time known, in microseconds, and never one that went back: new fencing tokens
    /// must be larger, whatever the server has forgotten.
    pub(crate) fn floor(&self) -> u64 {
        self.floor.load(Ordering::Relaxed)
    }

    /// Takes note of the server's time from one of its answers.
    pub(crate) fn observe(&self, server_time: u64) {
        if server_time > self.floor().saturating_add(FLOOR_STEP) {
            self.floor.fetch_max(server_time, Ordering::Relaxed);
        }
    }

    /// Connects, if there is no connection: an error within the limit says that the server is down.
    pub(crate) async fn connect(&self) -> Result<(), RedisError> {
        self.linked().await.map(drop)
    }

    async fn linked(&self) -> Result<Connected, RedisError> {
        if let Some(link) = self.link.current() {
            return Ok(link);
        }
        self.link.get(async |connection: &mut MultiplexedConnection| self.greet(connection).await).await
    }

    async fn greet(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        match redis::cmd("TIME").query_async::<(u64, u64)>(connection).await {
            Ok((seconds, micros)) => {
                self.floor.fetch_max(seconds * 1_000_000 + micros, Ordering::Relaxed);
                Ok(())
            }
            // Without this right the floor rises with the first answer that carries a time.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Since when the node has failed, and how, if it does.
    pub(crate) fn outage(&self) -> Option<(Moment, Failure)> {
        if self.fails.load(Ordering::Relaxed) { self.outage_lock().clone() } else { None }
    }

    /// Runs a script: by its SHA1, by its source if the server does not know it, and once more if the
    /// connection turns out to be broken, which every script must tolerate.
    ///
    /// # Cancel safety
    /// A request that was begun may run, now or later, after this future is dropped.
    pub(crate) async fn call(&self, call: &Call<'_>) -> Result<Reply, Failure> {
        let outcome = self.try_call(call).await;
        self.note(outcome.as_ref().err());
        outcome
    }

    async fn try_call(&self, call: &Call<'_>) -> Result<Reply, Failure> {
        let script = call.script();
        let mut resent = None;
        loop {
            // Whatever comes of the second delivery, the first one is unknown: that is what is reported.
            let Connected { crowd, generation } = match self.linked().await {
                Ok(link) => link,
                Err(source) => return Err(resent.unwrap_or_else(|| Failure::unsent(script, source))),
            };
            let error = match run(&crowd, call, self.floor()).await {
                Ok(value) => return Ok(Reply { script, value, generation, resent }),
                Err(error) => error,
            };
            if is_spent(&error) {
                self.link.drop_generation(generation);
            }
            let broken = error.is_connection_dropped();
            let failure = Failure::sent(script, error);
            if resent.is_some() || !broken {
                return Err(resent.unwrap_or(failure));
            }
            resent = Some(failure);
        }
    }

    /// Runs many scripts in one pipeline, with an answer for each, waiting no longer than `limit` for them.
    pub(crate) async fn call_all(&self, calls: &[Call<'_>], limit: Duration) -> Vec<Result<Reply, Failure>> {
        let Connected { crowd, generation } = match self.linked().await {
            Ok(link) => link,
            Err(source) => {
                let unsent = |call: &Call<'_>| Err(Failure::unsent(call.script(), source.clone()));
                return calls.iter().map(unsent).collect();
            }
        };
        let answers = run_all(&crowd, calls, limit, self.floor()).await;
        let reply = |(call, answer): (&Call<'_>, Result<Value, RedisError>)| {
            if answer.as_ref().is_err_and(is_spent) {
                self.link.drop_generation(generation);
            }
            let script = call.script();
            match answer {
                Ok(value) => Ok(Reply { script, value, generation, resent: None }),
                Err(source) => Err(Failure::sent(script, source)),
            }
        };
        calls.iter().zip(answers).map(reply).collect()
    }

    fn note(&self, failure: Option<&Failure>) {
        match failure.filter(|failure| failure.is_passing()) {
            Some(failure) => {
                self.outage_lock().get_or_insert_with(|| (Moment::now(), failure.clone()));
                self.fails.store(true, Ordering::Relaxed);
            }
            None if self.fails.load(Ordering::Relaxed) => {
                *self.outage_lock() = None;
                self.fails.store(false, Ordering::Relaxed);
            }
            None => {}
        }
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn outage_lock(&self) -> MutexGuard<'_, Option<(Moment, Failure)>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

async fn run(crowd: &Crowd, call: &Call<'_>, floor: u64) -> Result<Value, RedisError> {
    match crowd.send(call.by_sha1(floor)).await {
        Err(error) if is_unknown_script(&error) => crowd.send(call.by_source(floor)).await,
        answer => answer,
    }
}

async fn run_all(
    crowd: &Crowd,
    calls: &[Call<'_>],
    limit: Duration,
    floor: u64,
) -> Vec<Result<Value, RedisError>> {
    let mut answers = crowd.send_all(calls.iter().map(|call| call.by_sha1(floor)), limit).await;
    let forgotten: Vec<usize> =
        (0..answers.len()).filter(|&index| answers[index].as_ref().is_err_and(is_unknown_script)).collect();
    // Each by its source: between two commands of a pipeline, somebody may flush the scripts again.
    let again = crowd.send_all(forgotten.iter().map(|&index| calls[index].by_source(floor)), limit).await;
    for (index, answer) in forgotten.into_iter().zip(again) {
        answers[index] = answer;
    }
    answers
}
