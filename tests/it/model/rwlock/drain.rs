//! No stuck lock: from every state, with any set of dead clients, the others acquire and release,
//! and nothing is left.

use super::lock_state::ServerState;
use super::search::Search;
use super::steps::{ClientView, Move};
use crate::model::Violation;
use ClientView::{Done, Ended, Idle, Lost, Refused, Waits};

/// A number of polls of every client that no state exceeds.
const ROUNDS: usize = 40;

impl Search<'_> {
    /// Drains every state with every set of dead clients, and returns the number of drains.
    pub fn drain(&self) -> Result<usize, Violation> {
        let mut drained = 0;
        for at in 0..self.nodes.len() {
            let views = &self.nodes[at].state.views;
            let out: Vec<usize> =
                (0..views.len()).filter(|one| !matches!(views[*one], Idle | Done | Ended)).collect();
            for deaths in 0..1_u32 << out.len() {
                let dead: Vec<bool> = (0..views.len())
                    .map(|one| out.iter().position(|at| *at == one).is_some_and(|bit| deaths >> bit & 1 == 1))
                    .collect();
                for reversed in [false, true] {
                    drained += 1;
                    self.drain_one(at, &dead, reversed)?;
                }
            }
        }
        Ok(drained)
    }

    fn drain_one(&self, from: usize, dead: &[bool], reversed: bool) -> Result<(), Violation> {
        let mut order: Vec<usize> = (0..dead.len()).filter(|one| !dead[*one]).collect();
        if reversed {
            order.reverse();
        }
        let mut at = from;
        let mut steps = Vec::new();
        for _ in 0..ROUNDS {
            let before = at;
            for one in &order {
                if self.nodes[at].state.views[*one] == Waits {
                    self.take(&mut at, Move::Ask(*one), &mut steps);
                }
            }
            self.release_one(&mut at, &order, &mut steps);
            if at != before {
                continue;
            }
            let state = &self.nodes[at].state;
            let waits = order.iter().any(|one| !matches!(state.views[*one], Idle | Done | Ended));
            if !waits {
                let ended = state.views.contains(&Ended) && state.server_state.is_free();
                if dead.contains(&true)
                    || state.server_state.queue.is_empty() && (ended || state.server_state.is_gone())
                {
                    return Ok(());
                }
                return Err(self.stuck(from, dead, &steps, "all clients have finished, but keys are left"));
            }
            if !self.expire_one(&mut at, &order, &mut steps) {
                return Err(self.stuck(from, dead, &steps, "live clients wait for ever"));
            }
        }
        Err(self.stuck(from, dead, &steps, "the drain does not end"))
    }

    /// One client releases a hold or leaves the queue. An owner that waits keeps its other holds
    /// meanwhile.
    fn release_one(&self, at: &mut usize, order: &[usize], steps: &mut Vec<Move>) {
        let views = &self.nodes[*at].state.views;
        let owner = |one: usize| self.scenario.attempts[one].owner;
        let waits =
            |one: usize| order.iter().any(|other| views[*other] == Waits && owner(*other) == owner(one));
        for one in order {
            let step = match views[*one] {
                Refused => Move::Leave(*one),
                Lost => Move::Release(*one),
                view if view.holds() && !waits(*one) => Move::Release(*one),
                _ => continue,
            };
            return self.take(at, step, steps);
        }
    }

    /// Lets one hold of dead clients expire, or one mark that no live client refreshes.
    fn expire_one(&self, at: &mut usize, order: &[usize], steps: &mut Vec<Move>) -> bool {
        let state = &self.nodes[*at].state;
        let server_state: &ServerState = &state.server_state;
        let writer_waits = |owner: Option<usize>| {
            order.iter().any(|one| {
                let attempt = &self.scenario.attempts[*one];
                attempt.writes
                    && state.views[*one] == Waits
                    && owner.is_none_or(|owner| owner == attempt.owner)
            })
        };
        let all_dead = |attempts: &[usize]| attempts.iter().all(|one| !order.contains(one));
        let step =
            if server_state.writes().is_some_and(|hold| all_dead(&hold.attempts)) {
                Move::WriteOver
            } else if let Some(owner) = (0..self.scenario.owners.len())
                .find(|owner| server_state.reads(*owner).is_some_and(|hold| all_dead(&hold.attempts)))
            {
                Move::ReadOver(owner)
            } else if let Some((one, _)) = server_state.queue.iter().find(|(one, _)| {
                self.scenario.may_miss && !order.contains(one) && server_state.is_alive(*one)
            }) {
                Move::Missed(*one)
            } else if server_state.upgrade.is_some_and(|(live, owner)| live && !writer_waits(Some(owner))) {
                Move::UpgradeOver
            } else if server_state.writer_wait_until == Some(true) && !writer_waits(None) {
                Move::GateOver
            } else {
                return false;
            };
        self.take(at, step, steps);
        true
    }

    fn take(&self, at: &mut usize, step: Move, steps: &mut Vec<Move>) {
        let next = self.nodes[*at].steps.iter().find(|(taken, _)| *taken == step);
        let (_, to) = next.unwrap_or_else(|| panic!("{step:?} was not searched"));
        if to != at {
            steps.push(step);
        }
        *at = *to;
    }

    fn stuck(&self, from: usize, dead: &[bool], steps: &[Move], what: &str) -> Violation {
        let dead: Vec<&str> = self
            .scenario
            .attempts
            .iter()
            .zip(dead)
            .filter(|(_, dead)| **dead)
            .map(|(one, _)| one.name)
            .collect();
        let mut found = self.found(from, None, what.to_owned());
        found.way.push(format!("from here on, dead: {dead:?}"));
        found.way.extend(steps.iter().map(|step| step.describe(self.scenario, None)));
        found
    }
}
