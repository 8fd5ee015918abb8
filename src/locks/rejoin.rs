//! [`Locks::rejoin`]: admits nodes that may have lost their grants.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Locks;
use super::node_status::{NODE, NodeState, NodeStatus, Survey};
use crate::deployment::NodeSet;
use crate::error::{Error, NodeAnswer, NodeOutcome, Operation};
use crate::name::node_key;
use crate::options::RestartGuard;
use crate::wire::{Answer, Call, Failure, NodeReply, WaitFor, median_clock};

/// A node accepts no token that is further ahead of its clock than this, in microseconds.
const DAY: u64 = 86_400_000_000;

/// The latest of the nodes' clocks, without those so far ahead that a majority would refuse the
/// tokens made from them.
fn latest_clock(clocks: &[u64], majority: usize) -> u64 {
    let median_clock = median_clock(clocks.to_vec(), majority).unwrap_or_default();
    clocks.iter().copied().filter(|clock| *clock <= median_clock + DAY).max().unwrap_or(median_clock)
}

impl Locks {
    /// Admits all nodes of a [guarded](crate::RestartGuard) quorum that have no vote: those that
    /// are new, have restarted or have lost data. Call it once for a new quorum, and after every
    /// restart of a node.
    ///
    /// It waits for longer than the longest lease that the other nodes have granted, and at least
    /// for the longest TTL of the [options](Locks::options). By then, every lease that the node may
    /// have lost has expired. Then it sends the node the largest fencing token of a majority of the
    /// others.
    ///
    /// Both steps need a majority of nodes that have a vote. With fewer, the quorum grants no lock.
    ///
    /// In that case this call admits the nodes only if all nodes reply. The tokens then begin above
    /// all known tokens and clocks, ignoring a clock that is more than a day ahead of most. If a
    /// node does not reply, nothing changes.
    ///
    /// It returns all nodes that had no vote, with their present state: [`NodeState::Voter`] if
    /// they were admitted. Nodes that do not reply are skipped, and their state says why; call it
    /// again once they reply. Several clients may call it at the same time, and it may be repeated.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// for node in locks.rejoin().await? {
    ///     println!("{node}"); // 10.0.0.1:6379: votes
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::NoQuorum`]: too few nodes have a vote, and not all nodes reply.
    /// - [`Error::NotAdmitted`]: a node has restarted or lost data meanwhile. Call it again.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, nodes that were not admitted stay without a vote. Call it again.
    pub async fn rejoin(&self) -> Result<Vec<NodeStatus>, Error> {
        let context = || self.client.context_of_nodes(Operation::Rejoin);
        self.client.run(pin!(self.try_rejoin()), context).await
    }

    async fn try_rejoin(&self) -> Result<Vec<NodeStatus>, Error> {
        let nodes = &self.client.nodes;
        if nodes.deployment.decides_alone() || self.options.restart_guard == RestartGuard::Off {
            return Ok(Vec::new()); // all vote
        }
        let before = self.survey().await;
        let voted = NodeSet::of(before.voters());
        if before.not_admitted.is_empty() {
            return Ok(self.without_vote(voted, before));
        }
        let Some(may_admit_all) = self.is_new(&before) else { return Err(self.too_few(before)) };
        let ticket = Uuid::new_v4().to_string();
        let mut admitting = Vec::new();
        // All clients use the same order: if two admit nodes at the same time, one of them fails at
        // the first node.
        for (&place, run) in &before.not_admitted {
            if let Some(ticket) = self.admit(place, run, &ticket, None, may_admit_all).await? {
                admitting.push((place, run, ticket));
            }
        }
        if admitting.is_empty() {
            return Ok(self.without_vote(voted, self.survey().await));
        }
        let known = |survey: &Survey| Duration::from_millis(survey.longest_ttl);
        let mut longest = self.options.longest_ttl().max(known(&before));
        let mut waited = Duration::ZERO;
        let after = loop {
            tokio::time::sleep((longest - waited).mul_f64(1.0 + self.options.drift)).await;
            let after = self.survey().await;
            if known(&after) <= longest {
                break after;
            }
            // A request that was in flight has granted a longer lease.
            (waited, longest) = (longest, known(&after));
        };
        // A majority had a vote before, and has none now. To admit all nodes again, start from the
        // beginning.
        match self.is_new(&after) {
            Some(new) if new && !may_admit_all => return Err(self.not_admitted()),
            Some(_) => {}
            None => return Err(self.too_few(after)),
        }
        // In a new quorum, several nodes may have lost their tokens. Lost counters continue from
        // the clocks, so the latest clock replaces them.
        let min_token = after.highest.max(if may_admit_all {
            latest_clock(&after.clocks, nodes.deployment.majority())
        } else {
            0
        });
        let ttl = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        let mut admitted = NodeSet::of([]);
        for (place, run, ticket) in admitting {
            if self.admit(place, run, &ticket, Some((min_token, ttl)), may_admit_all).await?.is_some() {
                admitted = admitted.with(place);
            }
        }
        // A node that has restarted meanwhile has another run id than the one that was admitted.
        let now = self.survey().await;
        if now.not_admitted.keys().any(|place| admitted.contains(*place)) {
            return Err(self.not_admitted());
        }
        Ok(self.without_vote(voted, now))
    }

    /// Whether to admit all nodes again: false if a majority of nodes has a vote, true if it has
    /// not but all nodes reply. `None` if neither holds, so that no node can be admitted.
    fn is_new(&self, survey: &Survey) -> Option<bool> {
        let nodes = &self.client.nodes;
        let (voters, not_admitted) = (survey.voters().count(), survey.not_admitted.len());
        if voters >= nodes.deployment.majority() {
            Some(false)
        } else {
            (voters + not_admitted == nodes.deployment.nodes).then_some(true)
        }
    }

    fn too_few(&self, survey: Survey) -> Error {
        let context = self.client.context_of_nodes(Operation::Rejoin);
        let outcome = |(_, NodeStatus { node, state }): (usize, NodeStatus)| {
            let answer = match state {
                NodeState::Voter => NodeAnswer::Granted,
                NodeState::NotAdmitted => {
                    NodeAnswer::Failed(Error::NotAdmitted { context: context.clone().on(&node) })
                }
                NodeState::Failed(error) => NodeAnswer::failed(error),
            };
            NodeOutcome { node, answer }
        };
        let nodes = self.statuses(survey).map(outcome).collect();
        // Transient: silent nodes may reply later.
        Error::NoQuorum { context: context.with_verdict(true, false), nodes }
    }

    fn not_admitted(&self) -> Error {
        Error::NotAdmitted { context: self.client.context_of_nodes(Operation::Rejoin) }
    }

    /// Returns the nodes that had no vote before, or have none now.
    fn without_vote(&self, before: NodeSet, now: Survey) -> Vec<NodeStatus> {
        let statuses = self.statuses(now);
        let without = statuses.filter(|(place, status)| !before.contains(*place) || !status.is_voter());
        without.map(|(_, status)| status).collect()
    }

    /// Runs one step of an admission: the first without `knowing`, the second with it. Returns the
    /// ticket for the second step.
    ///
    /// If another client is already admitting the node, that is the other client's ticket, since
    /// both clients wait for the longest lease. Returns `None` if the node no longer replies: it is
    /// skipped like one that never replied. Two failures are errors instead: silence while the
    /// quorum is founded, which needs all nodes, and a refusal, which needs an operator.
    async fn admit(
        &self,
        place: usize,
        run: &str,
        ticket: &str,
        knowing: Option<(u64, u64)>,
        may_admit_all: bool,
    ) -> Result<Option<String>, Error> {
        let nodes = &self.client.nodes;
        let key = node_key(&self.options.prefix);
        let (min_token, ttl) = knowing.unzip();
        let call = Call::about_node(&NODE, "node/admit", &key).shared(run).shared(ticket);
        let call = Arc::new(call.shared(min_token).shared(ttl));
        let error =
            |failure: Failure| self.client.error(failure, self.client.context_of_nodes(Operation::Rejoin));
        let mut votes = nodes.ask(&call, NodeSet::of([place]), &Arc::default(), WaitFor::All).await;
        let reply = match votes.received.pop() {
            Some((_, Ok(reply))) => reply,
            Some((_, Err(failure))) if may_admit_all || !failure.is_no_reply() => {
                let answers = nodes.no_replies().with(place, NodeReply::Failed(failure));
                return Err(error(Failure::no_majority(answers)));
            }
            _ => return Ok(None),
        };
        if let Ok([_, ticket]) = reply.texts().as_deref() {
            return Ok(Some(ticket.clone()));
        }
        match reply.answer().map_err(error)? {
            Answer::Final(1) => Ok(Some(ticket.to_owned())),
            Answer::Final(0) => Err(self.not_admitted()),
            _ => Err(error(reply.unexpected())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::latest_clock;

    const HOUR: u64 = 3_600_000_000;
    const NOW: u64 = 20_000 * 24 * HOUR;

    #[test]
    fn a_new_quorum_begins_after_all_clocks_that_nodes_accept() {
        for (clocks, expected) in [
            (&[NOW, NOW + 1, NOW - 1][..], NOW + 1),
            (&[NOW + 20 * HOUR, NOW, NOW], NOW + 20 * HOUR),
            (&[NOW - 48 * HOUR, NOW, NOW + 2], NOW + 2),
            (&[NOW, NOW + 48 * HOUR, NOW], NOW),
            (&[NOW + 48 * HOUR, NOW + 7, NOW, NOW], NOW + 7),
            (&[NOW + 48 * HOUR, NOW, NOW + 480 * HOUR, NOW + 9, NOW - 48 * HOUR], NOW + 9),
            (&[NOW + 48 * HOUR, NOW, NOW + 480 * HOUR, NOW + 9, NOW], NOW + 9),
        ] {
            let clocks = clocks.to_vec();
            assert_eq!(latest_clock(&clocks, clocks.len() / 2 + 1), expected, "of {clocks:?}");
        }
    }
}
