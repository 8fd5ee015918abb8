//! The steps from a state: requests, each of them at any time, and expiries.

use redis::Cmd;

use super::clients::{CLAIM_MS, Fencing, MAX_DEPTH, Scenario, UNSUBSCRIBED_CHANNEL};
use super::lock_state::{Mode, PASSED, RECENT, ServerState, UPGRADES};
use super::state_scripts::Script;

/// A client's view of one of its attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientView {
    Idle,
    /// It got the answer "busy", or none.
    Waits,
    /// It holds the read side, with this token.
    Reads(i64),
    Writes(i64),
    /// Its hold was revoked or has expired.
    Lost,
    /// It got the answer that waiting would be a deadlock.
    Refused,
    /// It has been released, or has left the queue.
    Done,
    /// The same, and the server remembers its end.
    Ended,
}
use ClientView::{Done, Ended, Idle, Lost, Reads, Refused, Waits, Writes};

impl ClientView {
    pub fn holds(self) -> bool {
        matches!(self, Reads(_) | Writes(_))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub server_state: ServerState,
    pub views: Vec<ClientView>,
    /// The token of the last writer.
    pub written: i64,
    /// The server's time in each waiter's first busy answer: its later requests have that place.
    pub noted: Vec<Option<i64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Acquires or returns, without queueing.
    Try(usize),
    /// Acquires or queues.
    Ask(usize),
    /// The same request, but its client receives no answer.
    LostReply(usize),
    Release(usize),
    /// Releases and leaves the queue.
    Leave(usize),
    Renew(usize),
    Downgrade(usize),
    ForceReaders,
    ForceWriter,
    /// A hold expires.
    WriteOver,
    ReadOver(usize),
    /// One of two marks expires: the gate that keeps new readers out, or the upgrade's.
    GateOver,
    UpgradeOver,
    /// A waiter did not poll for longer than its claim.
    Missed(usize),
    /// The key expires, after every hold in it.
    KeyOver,
}

/// A script's answer: one integer, or "busy" with the server's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Final(i64),
    Busy(i64),
}

/// A TTL longer than any search.
const TTL: &str = "3600000";

impl Move {
    pub fn is_request(self) -> bool {
        use Move::{GateOver, KeyOver, Missed, ReadOver, UpgradeOver, WriteOver};
        !matches!(self, WriteOver | ReadOver(_) | GateOver | UpgradeOver | KeyOver | Missed(_))
    }

    /// The command to send; `None` for an expiry. The places in the state are relative to this
    /// instant.
    pub fn request(self, scenario: &Scenario, script: &Script, state: &State, instant: i64) -> Option<Cmd> {
        let names = |one: usize| {
            let attempt = &scenario.attempts[one];
            let owner = scenario.owners[attempt.owner];
            [("attempt", attempt.name), ("owner", if owner == attempt.name { "" } else { owner })]
        };
        let entry = |one: usize| {
            let channel = if scenario.attempts[one].is_unsubscribed { UNSUBSCRIBED_CHANNEL } else { "" };
            [("claim_ms", CLAIM_MS), ("channel", channel), ("max_depth", MAX_DEPTH)]
        };
        let least = ("min_token", if scenario.fencing == Fencing::Off { "" } else { "7" });
        let acquire = |one: usize, entry: &[(&'static str, &str)], place: Option<i64>| {
            let is_write = scenario.attempts[one].writes;
            let place = place.map_or_else(String::new, |place| (instant + place).to_string());
            let proposal = (state.server_state.counter.unwrap_or(instant) + 5).to_string();
            let token = match scenario.fencing {
                Fencing::Proposed => ("proposal", proposal.as_str()),
                _ => least,
            };
            let mut words =
                [&names(one)[..], &[("ttl_ms", TTL), token, ("queued_at", &place)], entry].concat();
            words.extend((!is_write).then_some(("max_readers", "100")));
            script.request(if is_write { "write" } else { "read" }, &words)
        };
        let force = |side| script.request("release", &[("attempt", "f"), least, ("force", side)]);
        Some(match self {
            Move::Try(one) => acquire(one, &[("max_depth", MAX_DEPTH)], None),
            Move::Ask(one) => acquire(one, &entry(one), state.noted[one]),
            Move::LostReply(one) => acquire(one, &entry(one), None),
            Move::Release(one) | Move::Leave(one) => {
                let mut words = [&names(one)[..], &[least]].concat();
                let is_late = scenario.attempts[one].has_late_requests;
                words.extend(is_late.then_some(("remember", "1")));
                if is_late || matches!(self, Move::Leave(_)) {
                    words.extend(entry(one));
                }
                script.request("release", &words)
            }
            Move::Renew(one) => script.request("renew", &[&names(one)[..], &[("ttl_ms", TTL)]].concat()),
            Move::Downgrade(one) => {
                script.request("downgrade", &[&names(one)[..], &[("ttl_ms", TTL), least]].concat())
            }
            Move::ForceReaders => force("read"),
            Move::ForceWriter => force("write"),
            _ => return None,
        })
    }

    /// Describes the step and its answer.
    pub fn describe(self, scenario: &Scenario, answer: Option<Answer>) -> String {
        let name = |one: usize| {
            let (owner, name) = (scenario.owners[scenario.attempts[one].owner], scenario.attempts[one].name);
            if owner == name { name.to_owned() } else { format!("{owner}'s {name}") }
        };
        let what = match self {
            Move::Try(one) => format!("{} tries", name(one)),
            Move::Ask(one) => format!("{} tries and queues", name(one)),
            Move::LostReply(one) => format!("{} tries and queues, and its answer is lost or late", name(one)),
            Move::Release(one) => format!("{} is released", name(one)),
            Move::Leave(one) => format!("{} is released and leaves the queue", name(one)),
            Move::Renew(one) => format!("{} is renewed", name(one)),
            Move::Downgrade(one) => format!("{} is downgraded", name(one)),
            Move::ForceReaders => "the readers' holds are revoked".to_owned(),
            Move::ForceWriter => "the writer's hold is revoked".to_owned(),
            Move::WriteOver => "the writer's hold expires".to_owned(),
            Move::ReadOver(owner) => format!("the read hold of {} expires", scenario.owners[owner]),
            Move::GateOver => "the gate for new readers expires".to_owned(),
            Move::UpgradeOver => "the upgrade's mark expires".to_owned(),
            Move::KeyOver => "the key expires".to_owned(),
            Move::Missed(one) => format!("{} does not poll for a claim", name(one)),
        };
        match answer {
            Some(Answer::Final(answer)) => format!("{what}: {answer}"),
            Some(Answer::Busy(_)) => format!("{what}: busy"),
            None => what,
        }
    }
}

impl State {
    pub fn first(scenario: &Scenario) -> State {
        let attempts = scenario.attempts.len();
        State {
            server_state: ServerState::new(scenario),
            views: vec![Idle; attempts],
            written: 0,
            noted: vec![None; attempts],
        }
    }

    /// The possible next steps; and the requests that can arrive, late or once more, but must
    /// change nothing.
    pub fn moves(&self, scenario: &Scenario) -> (Vec<Move>, Vec<Move>) {
        let (mut moves, mut idle) = (Vec::new(), Vec::new());
        let begun = self.views.iter().filter(|view| **view != Idle).count();
        for (one, attempt) in scenario.attempts.iter().enumerate() {
            match self.views[one] {
                Idle if begun == scenario.begun => {}
                Idle => {
                    moves.extend([Move::Try(one), Move::Ask(one)]);
                    moves.extend(attempt.has_late_requests.then_some(Move::LostReply(one)));
                }
                Waits => {
                    moves.extend([Move::Ask(one), Move::Leave(one)]);
                    moves.extend(attempt.has_late_requests.then_some(Move::LostReply(one)));
                }
                Writes(_) => {
                    moves.extend([Move::Release(one), Move::Downgrade(one), Move::LostReply(one)]);
                    idle.push(Move::Renew(one));
                }
                Reads(_) => {
                    moves.push(Move::Release(one));
                    idle.push(Move::Renew(one));
                    if attempt.writes {
                        idle.push(Move::Downgrade(one));
                    }
                    moves.extend(
                        (attempt.has_late_requests || !attempt.writes).then_some(Move::LostReply(one)),
                    );
                }
                Lost | Refused => {
                    let leaves = self.views[one] == Refused;
                    moves.push(if leaves { Move::Leave(one) } else { Move::Release(one) });
                    idle.push(Move::Renew(one));
                    moves.extend(attempt.has_late_requests.then_some(Move::LostReply(one)));
                }
                Done => {
                    moves.push(Move::Release(one));
                    idle.push(Move::Renew(one));
                    idle.extend(attempt.writes.then_some(Move::Downgrade(one)));
                }
                Ended => idle.extend([Move::LostReply(one), Move::Release(one)]),
            }
        }
        let server_state = &self.server_state;
        if server_state.writes().is_some() {
            moves.extend([Move::WriteOver, Move::ForceWriter]);
        }
        let readers = (0..scenario.owners.len()).filter(|owner| server_state.reads(*owner).is_some());
        moves.extend(readers.clone().map(Move::ReadOver));
        moves.extend(readers.clone().next().map(|_| Move::ForceReaders));
        moves.extend((server_state.writer_wait_until == Some(true)).then_some(Move::GateOver));
        moves.extend(server_state.upgrade.is_some_and(|(live, _)| live).then_some(Move::UpgradeOver));
        moves.extend((server_state.is_free() && !server_state.is_gone()).then_some(Move::KeyOver));
        let missed =
            (0..scenario.attempts.len()).filter(|one| scenario.may_miss && server_state.is_alive(*one));
        moves.extend(missed.map(Move::Missed));
        (moves, idle)
    }

    /// The state after an expiry.
    pub fn pass(&self, scenario: &Scenario, passes: Move) -> State {
        let mut next = self.clone();
        let server_state = &mut next.server_state;
        let over = match passes {
            Move::WriteOver => server_state.write.as_mut(),
            Move::ReadOver(owner) => server_state.reads[owner].as_mut(),
            _ => None,
        };
        if let Some(hold) = over {
            hold.is_live = false;
            for one in &hold.attempts {
                if next.views[*one].holds() {
                    next.views[*one] = Lost;
                }
            }
        }
        match passes {
            Move::GateOver => server_state.writer_wait_until = Some(false),
            Move::UpgradeOver => server_state.upgrade = server_state.upgrade.map(|(_, owner)| (false, owner)),
            Move::Missed(one) => next.miss(scenario, one),
            Move::WriteOver | Move::ReadOver(_) if server_state.mode != Mode::Sole => {}
            _ => {
                let (queue, seen) =
                    (std::mem::take(&mut server_state.queue), std::mem::take(&mut server_state.seen));
                let (counter, ended) = (server_state.counter, std::mem::take(&mut server_state.ended));
                *server_state = ServerState { queue, seen, ended, counter, ..ServerState::new(scenario) };
            }
        }
        next
    }

    /// A claim passes without a poll of this attempt, nor of those that queued before it and have
    /// not polled since.
    fn miss(&mut self, scenario: &Scenario, one: usize) {
        self.server_state.seen[one] = false;
        let missed = self.server_state.queued(one);
        for time in self.times() {
            if *time > RECENT && missed.is_some_and(|place| *time <= place) {
                *time -= PASSED;
            }
        }
        self.server_state.lapse(scenario);
    }

    fn times(&mut self) -> impl Iterator<Item = &mut i64> {
        let places =
            self.server_state.queue.iter_mut().map(|(_, place)| place).filter(|place| **place != UPGRADES);
        places.chain(&mut self.server_state.writer_left).chain(self.noted.iter_mut().flatten())
    }

    /// Replaces all times by others in the same order that do not depend on a clock. All are older
    /// than a claim, except the places of waiters that have not polled since they queued, and later
    /// times.
    fn order_times(&mut self) {
        let server_state = &self.server_state;
        let unseen =
            server_state.queue.iter().filter(|(one, place)| *place > RECENT && !server_state.seen[*one]);
        let recent = unseen.map(|(_, place)| *place).min().unwrap_or(i64::MAX);
        let mut times: Vec<i64> = self.times().map(|time| *time).collect();
        times.sort_unstable();
        times.dedup();
        for time in self.times() {
            let rank = times.binary_search(time).unwrap() as i64;
            *time = 10 * rank - 1_000_000 - if *time < recent { PASSED } else { 0 };
        }
    }

    /// Sets lost and refused attempts to `Done` if the server has nothing left of them and no
    /// request is in flight: both have the same next steps.
    pub fn simplify(&mut self, scenario: &Scenario) {
        for (one, view) in self.views.iter_mut().enumerate() {
            let is_done = !scenario.attempts[one].has_late_requests && !self.server_state.names(one);
            if is_done && matches!(view, Lost | Refused) {
                *view = Done;
            }
            // Its later requests have no place.
            if *view != Waits {
                self.noted[one] = None;
            }
        }
        self.order_times();
    }

    /// The bytes that distinguish this state from others.
    pub fn outline(&self, scenario: &Scenario) -> Vec<u8> {
        let mut outline = Vec::with_capacity(64);
        for view in &self.views {
            outline.push(match view {
                Idle => 0,
                Waits => 1,
                Reads(_) => 2,
                Writes(_) => 3,
                Lost => 4,
                Refused => 5,
                Done => 6,
                Ended => 7,
            });
        }
        for (one, noted) in self.noted.iter().enumerate() {
            // It does not matter for an attempt that is queued at this place.
            let matters =
                noted.is_some() && self.server_state.queued(one).is_none_or(|place| place == UPGRADES);
            outline.push(u8::from(matters) + u8::from(matters && *noted <= self.server_state.writer_left));
        }
        self.server_state.outline(scenario, &mut outline);
        outline
    }
}
