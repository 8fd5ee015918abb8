//! [`OutageRecord`]: since when a node has failed, and what is said of it: once when it begins, and
//! once when it ends.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::failure::{Ability, Failure};
use super::request::Shard;
use super::script::{Answer, Call, Reply};
use super::servers::Connection;
use crate::clock::Moment;
use crate::events::{Event, Observer};
use crate::guarded::Guarded;
use crate::measure;
use crate::traces::{Report, event};

/// The longest pause of a call between two tries during an outage.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What was not seen for so long is over once the node replies at all: of one master of a cluster,
/// or with some options, nothing may be asked any more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

/// More than any request takes: two and a half of the longest node timeouts.
const LONGEST_REQUEST: Duration = Duration::from_secs(180);

type Outcome = Result<Reply, Failure>;

/// Whether one node fails.
pub(super) struct OutageRecord {
    outage: Guarded<Outage>,
    /// Whether there is an outage: read without taking the lock.
    has_outage: AtomicBool,
    /// More than the longest time between two tries of a call.
    limit: Duration,
    label: Arc<str>,
    reports: Arc<Reports>,
    /// The number of locks that the client holds.
    holds: Arc<AtomicUsize>,
    observer: Arc<Observer>,
    runtime: Handle,
}

/// What fails, and what has ended to fail.
#[derive(Default)]
struct Outage {
    /// `None`: nothing fails.
    began: Option<Moment>,
    /// What each part of the node is not able to do.
    lacks: HashMap<(Shard, Ability), Lack>,
    /// When something was last shown to be possible again. A request that was begun before may fail
    /// later: of a server that was stopped for a while, it would begin the next outage.
    shown_again: HashMap<(Shard, Ability), Moment>,
}

struct Lack {
    since: Moment,
    /// When it was last seen, and the failure that showed it.
    seen: Moment,
    failure: Failure,
}

impl Lack {
    /// Whether it may have ended unseen: any reply ends a silence, but a write may not be tried for
    /// long. `limit`: more than the longest time between two tries of a call.
    fn is_old(&self, ability: Ability, limit: Duration) -> bool {
        self.is_forgotten() || ability > Ability::Reply && Moment::now().since(self.seen) > limit
    }

    fn is_forgotten(&self) -> bool {
        Moment::now().since(self.seen) > FORGOTTEN_AFTER
    }
}

/// What the outcome of this call shows that its server is able to do.
fn shown_by(call: &Call, outcome: &Outcome) -> Option<Ability> {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(failure) => return failure.shows(),
    };
    // A grant without fencing is 0, as is what another verb has not done.
    let least = i64::from(!matches!(call.verb(), "acquire" | "read" | "write"));
    let is_done = match reply.numbers() {
        Some(tokens) => call.is_group() && tokens.iter().all(|token| *token >= least),
        None => reply.expected().is_some_and(|answer| matches!(answer, Answer::Final(n) if n >= least)),
    };
    Some(match (call.verb(), call.replicas) {
        _ if !is_done => Ability::Reply,
        (_, Some((count, _))) => Ability::Replicate(count),
        ("renew" | "release" | "downgrade", None) => Ability::Write,
        _ => Ability::Store,
    })
}

/// What is still to be said, in the order in which it happened. A task of its own says it: a
/// subscriber that blocks keeps no request waiting.
#[derive(Default)]
struct Reports {
    queued: Guarded<VecDeque<Report>>,
    /// Held by the task that says it.
    saying: Mutex<()>,
}

impl Reports {
    async fn say(&self) {
        let _in_order = self.saying.lock().await;
        let next = || self.queued.lock().pop_front();
        while let Some(report) = next() {
            report();
        }
    }
}

impl OutageRecord {
    /// Must be called on the client's runtime.
    /// `limit` is that of the node.
    pub(super) fn new(
        label: &Arc<str>,
        limit: Duration,
        holds: &Arc<AtomicUsize>,
        observer: &Arc<Observer>,
    ) -> OutageRecord {
        OutageRecord {
            outage: Guarded::default(),
            has_outage: AtomicBool::new(false),
            limit: 4 * limit + LONGEST_PAUSE,
            label: Arc::clone(label),
            reports: Arc::default(),
            holds: Arc::clone(holds),
            observer: Arc::clone(observer),
            runtime: Handle::current(),
        }
    }

    fn has_outage(&self) -> bool {
        self.has_outage.load(Ordering::Relaxed)
    }

    /// Since when this part of the node has failed to do what a request needs, and with which
    /// failure, if it does.
    pub(super) fn current(
        &self,
        shard: impl FnOnce() -> Shard,
        needed: Ability,
    ) -> Option<(Moment, Failure)> {
        if !self.has_outage() {
            return None;
        }
        let shard = shard(); // not under the lock
        let outage = self.outage.lock();
        let matters = |of: &Shard, ability: Ability| (*of == shard || *of == Shard::All) && ability <= needed;
        let lacks = outage
            .lacks
            .iter()
            .filter(|((of, ability), lack)| matters(of, *ability) && !lack.is_old(*ability, self.limit));
        let first = lacks.map(|(_, lack)| lack).min_by_key(|lack| lack.since)?;
        Some((first.since, first.failure.clone()))
    }

    /// Records the outcomes of requests that were begun together. An outage that begins or ends is
    /// reported.
    pub(super) fn note(
        &self,
        connection: Option<&Connection>,
        begun: Moment,
        outcomes: &[(&Call, &Outcome)],
    ) {
        if !self.has_outage() && outcomes.iter().all(|(_, outcome)| outcome.is_ok()) {
            return;
        }
        let (mut shown, mut lacking) = (HashMap::new(), HashMap::new());
        for (call, outcome) in outcomes {
            let shard = connection.map_or(Shard::All, |connection| connection.shard(call.first_key()));
            if let Some(ability) = shown_by(call, outcome) {
                let best = shown.entry(shard.clone()).or_insert(ability);
                *best = ability.max(*best);
            }
            let knew = |shard| connection.is_none_or(|connection| connection.knew_shard(shard, begun));
            if let Err(failure) = outcome
                && let Some(ability) = failure.lacks()
                && knew(&shard)
            {
                lacking.entry((shard, ability)).or_insert(failure);
            }
        }
        // Of one pipeline, a single reply shows that the server is up.
        lacking.retain(|(shard, ability), _| shown.get(shard).is_none_or(|shown| shown < ability));
        if self.change(connection, begun, &shown, &lacking) {
            let reports = Arc::clone(&self.reports);
            self.runtime.spawn(async move { reports.say().await });
        }
    }

    /// Records what a node turned out to be able to do, and what not. Whether there is something to
    /// report.
    fn change(
        &self,
        connection: Option<&Connection>,
        begun: Moment,
        shown: &HashMap<Shard, Ability>,
        lacking: &HashMap<(Shard, Ability), &Failure>,
    ) -> bool {
        let mut outage = self.outage.lock();
        let Outage { began, lacks, shown_again } = &mut *outage;
        let now = Moment::now();
        // Another master may serve what the one before has failed to serve.
        let is_there =
            |of: &Shard| connection.is_none_or(|connection| connection.knew_shard(of, Moment::now()));
        let is_over = |of: &Shard, ability: &Ability, lack: &Lack| {
            let shows =
                |(shard, shown): (&Shard, &Ability)| (shard == of || *of == Shard::All) && shown >= ability;
            shown.iter().any(shows) || !shown.is_empty() && (lack.is_forgotten() || !is_there(of))
        };
        shown_again.retain(|_, shown| now.since(*shown) < LONGEST_REQUEST);
        lacks.retain(|key, lack| {
            let is_over = is_over(&key.0, &key.1, lack);
            if is_over {
                shown_again.insert(key.clone(), now);
            }
            !is_over
        });
        let mut reports: Vec<Report> = Vec::new();
        let is_new = |key: &(Shard, Ability)| shown_again.get(key).is_none_or(|shown| begun >= *shown);
        for (key, failure) in lacking.iter().filter(|(key, _)| is_new(key)) {
            match lacks.get_mut(key).filter(|lack| !lack.is_old(key.1, self.limit)) {
                Some(lack) => lack.seen = now,
                None => {
                    let new = Lack { since: now, seen: now, failure: (*failure).clone() };
                    lacks.insert(key.clone(), new);
                    reports.push(self.failing(failure));
                }
            }
        }
        let is_failing = !lacks.is_empty();
        match (*began, is_failing) {
            (None, true) => {
                *began = Some(now);
                reports.push(self.began());
            }
            (Some(since), false) => {
                *began = None;
                reports.push(self.ended(now.since(since)));
            }
            _ => {}
        }
        self.has_outage.store(is_failing, Ordering::Relaxed);
        let must_report = !reports.is_empty();
        self.reports.queued.lock().extend(reports); // under the lock: in the order of the changes
        must_report
    }

    fn failing(&self, failure: &Failure) -> Report {
        let (_server, _error) = (Arc::clone(&self.label), failure.clone());
        let _holds = self.holds.load(Ordering::Relaxed);
        Box::new(move || {
            event!(warn, server = %_server, holds = _holds, error = %_error, "a server fails: its leases expire unless it answers again");
        })
    }

    fn began(&self) -> Report {
        let (server, observer) = (Arc::clone(&self.label), Arc::clone(&self.observer));
        let holds = self.holds.load(Ordering::Relaxed);
        Box::new(move || {
            measure::outage(&server);
            observer.emit(|| Event::OutageBegan { server, holds });
        })
    }

    fn ended(&self, after: Duration) -> Report {
        let (server, observer) = (Arc::clone(&self.label), Arc::clone(&self.observer));
        let _holds = self.holds.load(Ordering::Relaxed);
        Box::new(move || {
            event!(info, server = %server, holds = _holds, after = ?after, "a server answers again");
            measure::outage_ended(&server);
            observer.emit(|| Event::OutageEnded { server, after });
        })
    }
}

impl Drop for OutageRecord {
    fn drop(&mut self) {
        if self.has_outage() {
            measure::outage_ended(&self.label); // for this client
        }
    }
}

#[cfg(all(test, feature = "simulation"))]
mod tests {
    use redis::{ErrorKind, RedisError};
    use tokio::time::advance;

    use super::*;

    /// So a call tries again within 41 seconds.
    const LIMIT: Duration = Duration::from_secs(10);

    fn record() -> OutageRecord {
        crate::simulation::skip_with_the_runtime();
        OutageRecord::new(&Arc::from("node"), LIMIT, &Arc::default(), &Arc::default())
    }

    /// This part of the node lacks an ability, as a request shows. Whether that is said.
    fn lacks(record: &OutageRecord, of: &Shard, ability: Ability) -> bool {
        let failure = Failure::unsent(RedisError::from((ErrorKind::Io, "closed")));
        let lacking = HashMap::from([((of.clone(), ability), &failure)]);
        record.change(None, Moment::now(), &HashMap::new(), &lacking)
    }

    /// Another part of the node replies.
    fn another_replies(record: &OutageRecord) {
        let shown = HashMap::from([(Shard::Unserved, Ability::Reply)]);
        record.change(None, Moment::now(), &shown, &HashMap::new());
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_is_not_tried_for_long_may_succeed_again() {
        let (record, shard) = (record(), Shard::All);
        let is_lacking = || record.current(|| shard.clone(), Ability::Store).is_some();
        assert!(lacks(&record, &shard, Ability::Write));
        advance(Duration::from_secs(30)).await;
        assert!(is_lacking());
        assert!(!lacks(&record, &shard, Ability::Write), "it was said");
        advance(Duration::from_secs(30)).await;
        assert!(is_lacking(), "it was seen again");
        advance(Duration::from_secs(20)).await;
        assert!(!is_lacking());
        assert!(lacks(&record, &shard, Ability::Write), "said again: it may have worked meanwhile");
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_is_not_asked_is_forgotten_after_a_minute() {
        let record = record();
        for ability in [Ability::Reply, Ability::Write] {
            let part = Shard::Master(String::new());
            lacks(&record, &part, ability);
            another_replies(&record);
            advance(Duration::from_secs(45)).await;
            another_replies(&record);
            assert!(record.has_outage(), "{ability:?}");
            assert!(record.current(|| Shard::Unserved, Ability::Store).is_none(), "it is another part");
            advance(Duration::from_secs(20)).await;
            assert!(record.current(|| part.clone(), Ability::Store).is_none(), "{ability:?}");
            another_replies(&record);
            assert!(!record.has_outage(), "{ability:?}");
        }
    }

    /// A server was stopped for a while. A request that was sent meanwhile is given up after a
    /// later one was answered.
    #[tokio::test(start_paused = true)]
    async fn a_request_of_an_outage_that_has_ended_begins_none() {
        let (record, before) = (record(), Moment::now());
        lacks(&record, &Shard::All, Ability::Reply);
        another_replies(&record);
        assert!(!record.has_outage());
        let failure = Failure::unsent(RedisError::from((ErrorKind::Io, "closed")));
        let lacking = HashMap::from([((Shard::All, Ability::Reply), &failure)]);
        assert!(!record.change(None, before, &HashMap::new(), &lacking));
        assert!(!record.has_outage());
        assert!(record.change(None, Moment::now(), &HashMap::new(), &lacking));
        assert!(record.has_outage());
    }
}
