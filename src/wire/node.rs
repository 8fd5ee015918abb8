//! [`Node`]: one Redis deployment that runs scripts.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::time::{Instant, sleep, timeout};

use super::answers::{LATE, NOT_ADMITTED};
use super::error_replies::{
    is_broken, is_forbidden, is_moved, names_key, node_of_a_cluster, too_slow, was_redirected, was_refused,
};
use super::facts::Facts;
use super::failure::{Ability, Cause, Failure};
use super::handshake::{Handshake, Membership};
use super::outage::OutageRecord;
use super::request::{PreparedCall, Shard, TimedReply};
use super::script::{Call, Reply};
use super::script_failure::{explain_failure, trial_of_rights};
use super::servers::{Endpoint, SentFlag};
use super::shared_connection::{LiveConnection, SharedConnection};
use crate::clock::Moment;
use crate::error::NodeProblem;
use crate::events::Observer;
use crate::name::Name;

/// How late a server with default settings may notice that the time limit of `WAIT` has passed: it
/// checks ten times a second.
const WAIT_TICK: Duration = Duration::from_millis(100);

/// How often a request to a cluster is sent at least while connections turn out to be broken, and
/// by how much each pause is longer than the one before. More often until the slots were asked for:
/// a replica may have replaced the master that refuses the connections.
const CLUSTER_TRIES: u32 = 8;
const CLUSTER_PAUSE: Duration = Duration::from_millis(5);

/// One deployment, reached through one shared connection, and a second one to wait for replicas.
pub(crate) struct Node {
    pub(super) connection: Arc<SharedConnection>,
    outage: OutageRecord,
}

impl Node {
    /// If `is_confirming` is true, requests wait for replicas from the start. `name` is set in
    /// `CLIENT LIST`; `holds` counts the client's locks, for logs. Must be called on the client's
    /// runtime.
    pub(crate) fn new(
        endpoint: Endpoint,
        limit: Duration,
        is_confirming: bool,
        place: Option<(usize, Arc<Membership>)>,
        name: Option<Arc<str>>,
        holds: &Arc<AtomicUsize>,
        observer: &Arc<Observer>,
    ) -> Node {
        let label: Arc<str> = endpoint.label().into();
        let outage = OutageRecord::new(&label, limit, holds, observer);
        let handshake = Handshake { limit, place, label, is_examined: Arc::default() };
        let connection = Arc::new(SharedConnection::new(endpoint, handshake, is_confirming, name));
        Node { connection, outage }
    }

    /// How long a server may stay silent after a request was written, or while it is connected to.
    pub(crate) fn limit(&self) -> Duration {
        self.connection.handshake.limit
    }

    /// In a quorum: its place, and the membership.
    fn place(&self) -> Option<&(usize, Arc<Membership>)> {
        self.connection.handshake.place.as_ref()
    }

    /// Whether the node consists of many servers, of which one may reply for another.
    pub(crate) fn is_cluster(&self) -> bool {
        self.connection.endpoint.is_cluster()
    }

    /// Whether the node has no vote after a restart, until it is admitted again.
    pub(super) fn has_restart_guard(&self) -> bool {
        self.place().is_some_and(|(_, membership)| membership.is_strict)
    }

    /// Records the server's time from one of its replies.
    pub(crate) fn observe(&self, server_time: u64) {
        self.connection.server_clock.observe(server_time);
    }

    /// Connects, if there is no connection. Takes at most two and a half node timeouts.
    pub(crate) async fn connect(&self) -> Result<(), RedisError> {
        self.connection.get(false).await.map(drop)
    }

    /// Looks for a connection that was closed, and connects if there is none. Whether it could is
    /// found by the requests.
    pub(crate) async fn check(&self) {
        if let Ok(connected) = self.connection.get(false).await
            && let Err(error) = connected.connection.check(self.limit()).await
        {
            self.connection.drop_if_spent(connected.generation, &error);
            let _found_by_requests = self.connection.get(false).await;
        }
    }

    /// Larger once another connection to one of the node's servers was made; `None` while there is
    /// none.
    pub(crate) fn connection_state(&self) -> Option<(u64, u64)> {
        self.connection.state()
    }

    /// What the node's servers report about themselves.
    pub(super) async fn facts(&self) -> Result<Vec<Facts>, RedisError> {
        let connected = self.connection.get(false).await?;
        Facts::ask(&connected.connection, &self.connection.handshake.label, self.limit()).await
    }

    /// Why the node may not be part of its quorum, as its last connection found.
    pub(crate) fn problem(&self) -> Option<NodeProblem> {
        self.place().and_then(|(place, membership)| membership.problem(*place))
    }

    /// Publishes outside of any script, and returns how many subscribers of the same server
    /// received the message. `None`: the user has no right to publish.
    pub(super) async fn publish(&self, channel: &str, message: &str) -> Result<Option<u64>, RedisError> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg(message);
        Ok(self.permitted(&publish).await?.map(redis::from_redis_value).transpose()?)
    }

    /// The commands that the user may not run in scripts. `None`: it may not send `EVAL`, by which
    /// this is tried. An error may be that of a key that the user may not access.
    pub(super) async fn missing_rights(&self, lock: &Name) -> Result<Option<Vec<String>>, RedisError> {
        let missing = self.permitted(&trial_of_rights(lock, false)).await?;
        Ok(missing.map(redis::from_redis_value).transpose()?)
    }

    /// `None`: the user has no right to send this.
    async fn permitted(&self, command: &Cmd) -> Result<Option<Value>, RedisError> {
        let connected = self.connection.get(false).await?;
        match connected.connection.query(command, self.limit()).await {
            Ok(reply) => Ok(Some(reply)),
            Err(error) if is_forbidden(&error) && !names_key(&error) => Ok(None),
            Err(error) => {
                self.connection.drop_if_spent(connected.generation, &error);
                Err(error)
            }
        }
    }

    /// The run id of the server.
    pub(crate) async fn run_id(&self) -> Result<Option<Arc<str>>, RedisError> {
        Ok(self.connection.get(false).await?.run.clone())
    }

    /// Since when the server of this lock has failed to do what a request needs, and with which
    /// failure, if it does.
    pub(super) fn outage(&self, key: Option<&str>, needed: Ability) -> Option<(Moment, Failure)> {
        let shard = || self.connection.current(false).map_or(Shard::All, |live| live.connection.shard(key));
        self.outage.current(shard, needed)
    }

    pub(super) fn note(&self, begun: Moment, outcomes: &[(&Call, &Result<Reply, Failure>)]) {
        let live = self.connection.current(false);
        self.outage.note(live.as_ref().map(|live| &live.connection), begun, outcomes);
    }

    /// Sends a call when its turn comes; once more if the connection turns out to be broken, which
    /// every script must tolerate. A cluster has many connections, and a broken one is found by
    /// using it: there it tries again more often.
    ///
    /// # Cancel safety
    /// Not cancel safe: a request that was written may run, now or later; `sent_flag` says whether
    /// one was.
    pub(super) async fn send(&self, call: &Arc<Call>, sent_flag: &SentFlag) -> Result<Reply, Failure> {
        let begun = Moment::now();
        let mut trying = pin!(self.try_send(call, sent_flag));
        let outcome = match self.place() {
            None => trying.await,
            Some(_) => self.unless_silent(call, trying.as_mut()).await,
        };
        self.note(begun, &[(call, &outcome)]);
        outcome
    }

    /// Awaits the vote of a node of a quorum. Connecting and sending together take no longer than
    /// finding out that a connection is silent; waiting for replicas comes after that. The request
    /// waits for its turn for as long as the node replies to others.
    async fn unless_silent(
        &self,
        call: &Arc<Call>,
        mut trying: Pin<&mut impl Future<Output = Result<Reply, Failure>>>,
    ) -> Result<Reply, Failure> {
        let replica_timeout = call.replicas.map_or(Duration::ZERO, |(_, timeout)| timeout);
        loop {
            match timeout(self.limit() * 5 / 4 + replica_timeout, trying.as_mut()).await {
                Ok(Ok(reply)) if self.refuses(call, &reply) => {
                    return Err(Failure::new(Cause::NotAdmitted, false).after(reply.first_failure));
                }
                Ok(outcome) => return outcome,
                Err(_) if self.is_answering() => {}
                Err(_) => return Err(Failure::indeterminate(too_slow())),
            }
        }
    }

    /// Whether the connection delivers replies, so that a slow call is one that waits for its turn.
    fn is_answering(&self) -> bool {
        self.connection.current(false).is_some_and(|connected| connected.connection.is_answering())
    }

    /// Whether the node has replied that it has no vote.
    fn refuses(&self, call: &Arc<Call>, reply: &Reply) -> bool {
        let Some((place, membership)) = self.place().filter(|_| call.is_guarded()) else {
            return false;
        };
        let refuses = reply.is_number(NOT_ADMITTED);
        membership.note(*place, refuses);
        refuses
    }

    async fn try_send(&self, call: &Arc<Call>, sent_flag: &SentFlag) -> Result<Reply, Failure> {
        let (name, start) = (call.name, Moment::now());
        let (mut first_failure, mut tries) = (None, 0);
        loop {
            // The effect of the first delivery is unknown, whatever the second one returns: that is
            // reported.
            let connected = match self.connection.get(call.replicas.is_some()).await {
                Ok(connected) => connected,
                Err(source) => return Err(Failure::unsent(source).after(first_failure)),
            };
            let generation = connected.generation;
            // Before the try, which goes to the master that is known now: it may be refused after
            // the slots were learned.
            let has_asked = connected.connection.has_asked_since(start);
            let error = match self.run(call, &connected, sent_flag).await {
                Ok(answered) => {
                    // A grant of an earlier delivery may count from before.
                    let sent = if first_failure.is_some() { start } else { answered.sent };
                    let reply = Reply { name, value: answered.value, sent, generation, first_failure };
                    if call.may_be_late() && reply.is_number(LATE) {
                        // Refused, so it may be sent again; an earlier delivery may have run.
                        return Err(Failure::new(Cause::Late, false).after(reply.first_failure));
                    }
                    return self.confirm(call, &connected, reply).await;
                }
                Err(error) => error,
            };
            self.connection.drop_if_spent(generation, &error);
            let broken = error.is_connection_dropped();
            let failure = if sent_flag.is_set() {
                self.failure_of_sent(error)
            } else {
                Failure::unsent(error) // still queued
            };
            tries += 1;
            let is_last = if self.is_cluster() {
                tries >= CLUSTER_TRIES && has_asked || Moment::now().since(start) >= self.limit() / 2
            } else {
                tries > 1
            };
            if is_last || !broken {
                let examined = Box::pin(explain_failure(&connected.connection, call, self.limit(), failure));
                let failure = examined.await;
                return Err(first_failure.unwrap_or(failure));
            }
            // A redirection was sent too, but has run nowhere.
            first_failure = first_failure.or(Some(failure).filter(Failure::is_indeterminate));
            sleep(CLUSTER_PAUSE * (tries - 1)).await;
        }
    }

    /// Sends a call. One that only reads is sent once more as such if the user may not write.
    async fn run(
        &self,
        call: &Arc<Call>,
        on: &LiveConnection,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let mut prepared = self.prepare(call, on);
        let refused = match on.connection.send(&prepared, sent_flag).await {
            // Not at first: servers before Redis 7 do not know the read-only form.
            Err(error) if call.is_read_only && is_forbidden(&error) => error,
            answer => return answer,
        };
        prepared.is_read_only = true;
        match on.connection.send(&prepared, sent_flag).await {
            // Report the first refusal, since the documentation names the right for that form.
            Err(error) if !is_broken(&error) => Err(refused),
            answer => answer,
        }
    }

    /// Waits until the required replicas have what a request wrote, on the connection that it was
    /// sent through, and so everything written before. A server knows what to wait for only if the
    /// request did write; every grant does.
    async fn confirm(&self, call: &Arc<Call>, on: &LiveConnection, reply: Reply) -> Result<Reply, Failure> {
        let Some((replicas, replica_timeout)) =
            call.replicas.filter(|_| matches!(reply.value, Value::Int(0..)))
        else {
            return Ok(reply);
        };
        let mut wait = redis::cmd("WAIT");
        wait.arg(replicas).arg(u64::try_from(replica_timeout.as_millis()).unwrap_or(u64::MAX).max(1));
        match on.connection.query_in_turn(&wait, replica_timeout + self.limit().max(WAIT_TICK)).await {
            Ok(Value::Int(count)) if count >= i64::from(replicas) => Ok(reply),
            Ok(Value::Int(confirmed)) => {
                Err(Failure::new(Cause::Unreplicated { confirmed, required: replicas }, true))
            }
            Ok(other) => Err(Reply { value: other, ..reply }.unexpected()),
            Err(error) => {
                self.connection.drop_if_spent(on.generation, &error);
                Err(Failure::indeterminate(error))
            }
        }
    }

    /// Sends many calls in one pipeline, ahead of those that wait, and waits for the replies for at
    /// most `limit`.
    pub(super) async fn send_ahead(
        &self,
        calls: &[&Arc<Call>],
        limit: Duration,
    ) -> Vec<Result<Reply, Failure>> {
        let begun = Moment::now();
        let connected = match self.connection.get(false).await {
            Ok(connected) => connected,
            Err(source) => {
                let failure = Err(Failure::unsent(source));
                calls.first().into_iter().for_each(|call| self.note(begun, &[(call, &failure)]));
                return vec![failure; calls.len()];
            }
        };
        let (generation, asked) = (connected.generation, Instant::now());
        let prepared = calls.iter().map(|call| self.prepare(call, &connected)).collect();
        let answers = connected.connection.send_ahead(prepared, limit).await;
        let reply = |(call, answer): (&&Arc<Call>, Result<TimedReply, RedisError>)| match answer {
            Ok(TimedReply { value, sent }) => {
                let reply = Reply { name: call.name, value, sent, generation, first_failure: None };
                self.refuses(call, &reply);
                Ok(reply)
            }
            Err(error) => {
                // A server that answers others is only slower than these may wait.
                if !(error.is_timeout() && connected.connection.has_replied_since(asked)) {
                    self.connection.drop_if_spent(generation, &error);
                }
                Err(self.failure_of_sent(error))
            }
        };
        let replies: Vec<_> = calls.iter().zip(answers).map(reply).collect();
        let outcomes: Vec<_> = calls.iter().map(|call| &***call).zip(&replies).collect();
        self.note(begun, &outcomes);
        replies
    }

    /// The failure of a request that was sent.
    fn failure_of_sent(&self, error: RedisError) -> Failure {
        // In a cluster, a request may first have to connect.
        let is_unsent = || was_redirected(&error) || error.is_connection_refusal();
        let has_not_run = was_refused(&error) || self.is_cluster() && is_unsent();
        if !self.is_cluster() && is_moved(&error) {
            return Failure::unsent(node_of_a_cluster(&error));
        }
        Failure::new(Cause::Sent(error), !has_not_run)
    }

    fn prepare(&self, call: &Arc<Call>, connected: &LiveConnection) -> PreparedCall {
        PreparedCall {
            call: Arc::clone(call),
            clock: Arc::clone(&self.connection.server_clock),
            run: connected.run.clone(),
            slot: None,
            is_read_only: false,
            is_alone: false,
        }
    }
}
