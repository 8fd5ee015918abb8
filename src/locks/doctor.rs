//! [`Locks::doctor`]: finds settings and rights of the servers that endanger locks.

use std::pin::pin;
use std::time::Duration;

use super::Locks;
use super::node_status::{NodeState, NodeStatus};
use crate::diagnosis::{Check, Finding, GRANT_RIGHTS, Verdict, unusable};
use crate::error::{Chain, Error};
use crate::mutex::MUTEX;
use crate::options::{Options, RestartGuard, Wakeups};

impl Locks {
    /// Checks the servers for conditions that endanger locks: no reply, missing rights, evicted
    /// keys, restarts and failovers that lose locks.
    ///
    /// It sends `INFO`, `CONFIG GET` and `TIME` to each server; in a cluster to each master.
    /// Under a new name, it tries each command of the scripts, and acquires and releases a lock.
    /// Its fencing counter stays for one second.
    ///
    /// A check for which the user lacks a right is [unknown](Verdict::Unknown); a missing right
    /// that locks need is a danger that names it. If no server can be used, only
    /// [`Check::Connection`] names the cause.
    ///
    /// Once the client's runtime has ended, nothing is sent, and every connection is unknown.
    ///
    /// On one server without `appendfsync always`, [`Check::Persistence`] is always a danger.
    /// Choose which dangers stop a deployment.
    ///
    /// **What it does not**: predict how servers behave later. Clocks are compared with this
    /// machine's, to within a second.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) {
    /// for finding in locks.doctor().await {
    ///     println!("{finding}"); // 10.0.0.1:6379: eviction: fine
    /// }
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the lock that it may have acquired is released in the background.
    pub async fn doctor(&self) -> Vec<Finding> {
        let findings = self.client.with_runtime(pin!(self.examine())).await;
        findings.unwrap_or_else(|| self.nothing_is_known())
    }

    async fn examine(&self) -> Vec<Finding> {
        let nodes = &self.client.nodes;
        if self.client.has_ended().await {
            return self.nothing_is_known();
        }
        let guarded = self.options.restart_guard == RestartGuard::On;
        let has_confirmation = self.options.wants_replicas().is_some();
        let mut findings = Vec::new();
        for (place, facts) in nodes.facts().await.into_iter().enumerate() {
            let server = nodes.labels[place].clone();
            let connection = match &facts {
                Ok(_) => Verdict::Fine,
                Err(error) => unusable(&error.to_string()),
            };
            findings.push(Finding { server, check: Check::Connection, verdict: connection });
            findings
                .extend(facts.iter().flatten().flat_map(|facts| facts.findings(has_confirmation, guarded)));
        }
        let (scripts, notifications) = if findings.iter().any(Finding::is_usable) {
            let notifications = self.examine_notifications().await;
            (self.examine_scripts().await, notifications)
        } else {
            let unknown = Verdict::unknown("no server can be used");
            (unknown.clone(), unknown)
        };
        if guarded {
            findings.extend(self.examine_votes().await);
        }
        let server = nodes.labels.join(", ");
        findings.push(Finding { server: server.clone(), check: Check::Scripts, verdict: scripts });
        findings.push(Finding { server, check: Check::Notifications, verdict: notifications });
        findings
    }

    /// The findings once the client's runtime, and so its connections, have ended.
    fn nothing_is_known(&self) -> Vec<Finding> {
        let why =
            "the runtime on which the client was made has ended: make another client on a runtime that lasts";
        let finding = |label: &str| Finding {
            server: label.to_owned(),
            check: Check::Connection,
            verdict: Verdict::unknown(why),
        };
        self.client.nodes.labels.iter().map(|label| finding(label)).collect()
    }

    async fn examine_scripts(&self) -> Verdict {
        let name = format!("doctor-{}", uuid::Uuid::new_v4().simple());
        if let Ok(lock) = self.lock(&MUTEX, &name) {
            let missing = self.client.nodes.missing_rights(&lock.name).await;
            if !missing.is_empty() {
                let missing = Vec::from_iter(missing).join(" ");
                return Verdict::danger(
                    format!("the user lacks rights that locks need: {missing}"),
                    GRANT_RIGHTS,
                );
            }
        }
        // The lock names what else fails.
        let tried = async {
            // The fencing counter is a key that outlives the lock.
            let options = Options::new().token_ttl(Duration::from_secs(1)).hold_at_least(Duration::ZERO);
            match self.with_options(options)?.mutex(&name)?.try_lock().await? {
                Some(guard) => guard.release().await,
                None => Ok(()), // no majority of a quorum agreed in time; the scripts ran
            }
        };
        match tried.await {
            Ok(()) => Verdict::Fine,
            Err(Error::Closed { .. }) => Verdict::unknown("the client was closed"),
            Err(error) => Verdict::danger(
                format!("could not acquire and release a lock: {}", Chain(&error)),
                remedy_of(&error),
            ),
        }
    }

    /// Whether the nodes of a guarded quorum vote. A node that does not reply has a finding.
    async fn examine_votes(&self) -> Vec<Finding> {
        let verdict = |state: NodeState| match state {
            NodeState::Voter => Some(Verdict::Fine),
            NodeState::NotAdmitted => Some(Verdict::danger(
                "it has no vote: it is new, has restarted or has lost data",
                "call Locks::rejoin, or run `redlatch quorum rejoin`",
            )),
            NodeState::Failed(_) => None,
        };
        let finding = |node: NodeStatus| {
            Some(Finding { server: node.node, check: Check::Vote, verdict: verdict(node.state)? })
        };
        self.nodes().await.into_iter().filter_map(finding).collect()
    }

    async fn examine_notifications(&self) -> Verdict {
        if self.options.wakeups == Wakeups::Poll {
            return Verdict::Fine;
        }
        let (nodes, wakeups) = (&self.client.nodes, &self.client.wakeups);
        if !wakeups.start(2 * nodes.limit()).await {
            let remedy = "grant the user the right to subscribe to the wake-up channels";
            return Verdict::danger("the client cannot subscribe, so it polls", remedy);
        }
        let outcomes = nodes.publish_everywhere(&wakeups.channel).await;
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(None))) {
            return Verdict::danger(
                "the client may not publish: waiters that it grants a lock to are not notified, and poll",
                "grant the user the right to publish to the wake-up channels",
            );
        }
        if outcomes.iter().any(Result::is_ok) { Verdict::Fine } else { Verdict::unknown("no server replied") }
    }
}

fn remedy_of(error: &Error) -> &'static str {
    let code = match error {
        Error::Redis { cause, .. } => cause.code(),
        _ => None,
    };
    match code {
        Some("NOPERM") => GRANT_RIGHTS,
        Some("MOVED" | "CROSSSLOT") => {
            "it is a node of a cluster: use LocksBuilder::cluster, or the program's --cluster"
        }
        Some("READONLY") => "it is a replica: name its master",
        _ => "look the error up in the guide at docs.rs/redlatch, page errors",
    }
}
