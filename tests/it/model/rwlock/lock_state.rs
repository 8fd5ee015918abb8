//! The state of a lock on a server, and its parser.

use super::clients::Scenario;
use super::state_scripts::{Look, OTHERS};

/// A hold: its owner, its attempts, and whether it has expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub is_live: bool,
    pub owner: usize,
    pub attempts: Vec<usize>,
}

/// The meaning of the field `mode`; without that field there is no key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    #[default]
    Free,
    /// There is one hold, and it expires with the key.
    Sole,
    Several,
}

/// All that the scripts know of a lock. An expiry is only pending or past; tokens are the server's.
/// Times are microseconds relative to the moment at which the state is written to the server, by
/// this process's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerState {
    pub mode: Mode,
    pub write: Option<Hold>,
    pub reads: Vec<Option<Hold>>,
    pub readers: Option<i64>,
    pub writer_wait_until: Option<bool>,
    pub upgrade: Option<(bool, usize)>,
    pub writer_left: Option<i64>,
    pub token: Option<i64>,
    /// The queued attempts in their order, with their places.
    pub queue: Vec<(usize, i64)>,
    /// The attempts with a mark that they polled within their claim.
    pub seen: Vec<bool>,
    pub counter: Option<i64>,
    /// The answers of the releases that ended the attempts.
    pub ended: Vec<Option<i64>>,
}

/// A state read from the server.
#[derive(Debug)]
pub struct ParsedState {
    pub server_state: ServerState,
    /// The attempts whose hold lasts for a TTL, not only for a claim.
    pub lasting: Vec<usize>,
}

/// The place of an owner that reads and waits for an upgrade.
pub const UPGRADES: i64 = i64::MIN;

/// The scores of readers are their times minus this; those of marks are their times plus this.
pub const LANE: i64 = 1 << 52;

/// A place that is later than this is within its claim, for at least fifty more seconds.
pub const RECENT: i64 = -5_000_000;

/// The age that is added to a place when its claim passes.
pub const PASSED: i64 = 99_000_000;

/// Milliseconds: longer than a claim, and shorter than a TTL.
const LONGER_THAN_A_CLAIM: i64 = 100_000;

impl ParsedState {
    /// Parses what [`look`](super::state_scripts::look) saw. `Err`: a rule that the state breaks.
    pub fn read(scenario: &Scenario, instant: i64, look: Look) -> Result<ParsedState, String> {
        let (hash, queue, counter, pttl, queue_pttl, fence_pttl, (seconds, micros)) = look;
        if [pttl, queue_pttl, fence_pttl].contains(&-1) {
            return Err("a key has no TTL".to_owned());
        }
        let mut state = ServerState { counter, ..ServerState::new(scenario) };
        let mut lasting = Vec::new();
        let is_sole = hash.iter().any(|(name, value)| name == "mode" && value != "several");
        if is_sole && hash.iter().any(|(name, _)| name != "mode" && name != "token") {
            return Err("a sole hold has other fields beside it".to_owned());
        }
        if !hash.is_empty() && hash.iter().all(|(name, _)| name != "mode") {
            return Err("the hash has no mode".to_owned());
        }
        let (now, mut latest) = (instant / 1000, 0);
        let is_long = |ends: i64| ends > now + LONGER_THAN_A_CLAIM;
        for (name, value) in &hash {
            let number = || value.parse::<i64>().unwrap();
            let mut words = value.split(' ');
            let mut ends = || words.next().unwrap().parse::<i64>().unwrap();
            let mut hold = |ends, owner: &str, words: std::str::Split<'_, char>| {
                let attempts: Vec<usize> = words.map(|word| scenario.attempt(word)).collect();
                if is_long(ends) {
                    lasting.extend(&attempts);
                }
                latest = latest.max(ends);
                Some(Hold { is_live: ends > now, owner: scenario.owner(owner), attempts })
            };
            match name.as_str() {
                "mode" if !is_sole => state.mode = Mode::Several,
                "mode" => {
                    let (Some("sole"), Some(side), Some(owner)) = (words.next(), words.next(), words.next())
                    else {
                        return Err(format!("an unknown mode: {value}"));
                    };
                    let hold = hold(now + pttl, owner, words);
                    if hold.as_ref().is_none_or(|hold| hold.attempts.len() != 1) {
                        return Err(format!("a sole hold of several attempts: {value}"));
                    }
                    state.mode = Mode::Sole;
                    if side == "read" {
                        state.reads[scenario.owner(owner)] = hold;
                    } else {
                        state.write = hold;
                    }
                }
                "write" => {
                    let (ends, owner) = (ends(), words.next().unwrap());
                    state.write = hold(ends, owner, words);
                }
                "readers" => state.readers = Some(number()),
                "writer_wait_until" | "upgrade" => {
                    let ends = ends();
                    if is_long(ends) {
                        return Err(format!("{name} lasts longer than a claim"));
                    }
                    match words.next() {
                        None => state.writer_wait_until = Some(ends > now),
                        Some(owner) => state.upgrade = Some((ends > now, scenario.owner(owner))),
                    }
                }
                "writer_left" => state.writer_left = Some(number() - instant),
                "token" => state.token = Some(number()),
                _ => match name.strip_prefix("read:") {
                    Some(owner) => {
                        let ends = ends();
                        state.reads[scenario.owner(owner)] = hold(ends, owner, words);
                    }
                    None => return Err(format!("an unknown field: {name} {value}")),
                },
            }
        }
        if is_sole && state.write.is_none() {
            // The counter's token is stored once there is a second hold.
            state.token = counter;
        }
        // The time was read after the TTL.
        if !hash.is_empty() && seconds * 1000 + micros / 1000 + pttl + 2 < latest {
            return Err("the key ends before a hold".to_owned());
        }
        let mut others = 0;
        for (entry, score) in &queue {
            let score = *score as i64;
            let mark = entry.split_once(' ').filter(|(word, _)| ["seen", "ended"].contains(word));
            let until = score - LANE - instant;
            if mark.is_some_and(|(word, _)| until <= if word == "seen" { 61_000_000 } else { 0 }) {
                continue;
            }
            if scenario.others && OTHERS.contains(&entry.as_str()) {
                others += 1;
                continue;
            }
            match mark {
                Some(("seen", name)) => state.seen[scenario.attempt(name)] = true,
                // The marks of force requests, each of which is an attempt of its own.
                Some((_, "f")) => {}
                Some((_, name)) => {
                    state.ended[scenario.attempt(name)] = Some((score - LANE) % 1_000_000 - 10);
                }
                None => {
                    let one = scenario.attempt(entry.split(' ').next().unwrap());
                    let place = match (scenario.attempts[one].writes, score) {
                        (true, 0) => UPGRADES,
                        (true, 1..) => score - instant,
                        (false, ..0) => score + LANE - instant,
                        _ => return Err(format!("an impossible place: {score} {entry}")),
                    };
                    if *entry != scenario.waiter(one) {
                        return Err(format!("an unknown waiter: {entry}"));
                    }
                    state.queue.push((one, place));
                }
            }
        }
        if is_sole && !state.queue.is_empty() {
            return Err("attempts wait beside a sole hold".to_owned());
        }
        if scenario.others && others != OTHERS.len() {
            return Err("an entry of another kind, or a mark of another attempt, was removed".to_owned());
        }
        Ok(ParsedState { server_state: state, lasting })
    }
}

impl ServerState {
    pub fn new(scenario: &Scenario) -> ServerState {
        let (attempts, owners) = (scenario.attempts.len(), scenario.owners.len());
        let (seen, ended) = (vec![false; attempts], vec![None; attempts]);
        ServerState { reads: vec![None; owners], seen, ended, ..ServerState::default() }
    }

    pub fn writes(&self) -> Option<&Hold> {
        self.write.as_ref().filter(|hold| hold.is_live)
    }

    pub fn reads(&self, owner: usize) -> Option<&Hold> {
        self.reads[owner].as_ref().filter(|hold| hold.is_live)
    }

    pub fn queued(&self, attempt: usize) -> Option<i64> {
        self.queue.iter().find(|(one, _)| *one == attempt).map(|(_, place)| *place)
    }

    /// Whether an attempt is queued and was seen within its claim.
    pub fn is_alive(&self, attempt: usize) -> bool {
        self.queued(attempt).is_some_and(|place| place > RECENT || self.seen[attempt])
    }

    /// The live waiters of one side.
    pub fn waiters(&self, scenario: &Scenario, writes: bool) -> Vec<usize> {
        let queued = self.queue.iter().map(|(one, _)| *one);
        queued.filter(|one| scenario.attempts[*one].writes == writes && self.is_alive(*one)).collect()
    }

    pub fn is_free(&self) -> bool {
        self.writes().is_none() && (0..self.reads.len()).all(|owner| self.reads(owner).is_none())
    }

    /// Whether the key does not exist.
    pub fn is_gone(&self) -> bool {
        self.mode == Mode::Free
    }

    /// The state without expired holds and marks and without dead waiters, of which each script
    /// removes some.
    pub fn swept(&self) -> ServerState {
        ServerState {
            mode: Mode::Free,
            write: self.writes().cloned(),
            reads: (0..self.reads.len()).map(|owner| self.reads(owner).cloned()).collect(),
            readers: None,
            writer_wait_until: self.writer_wait_until.filter(|live| *live),
            upgrade: self.upgrade.filter(|(live, _)| *live),
            queue: self.queue.iter().copied().filter(|(one, _)| self.is_alive(*one)).collect(),
            seen: Vec::new(),
            ..self.clone()
        }
    }

    /// Describes the differences between two states.
    pub fn change(&self, other: &ServerState, scenario: &Scenario) -> String {
        let parts = |server_state: &ServerState| {
            let names =
                |some: &[usize]| some.iter().map(|one| scenario.attempts[*one].name).collect::<Vec<_>>();
            let holds = |hold: &Hold| (scenario.owners[hold.owner], names(&hold.attempts));
            let queue: Vec<usize> = server_state.queue.iter().map(|(one, _)| *one).collect();
            [
                format!("write {:?}", server_state.write.as_ref().map(holds)),
                format!("read {:?}", server_state.reads.iter().flatten().map(holds).collect::<Vec<_>>()),
                format!("queue {:?}", names(&queue)),
                format!("writer_wait_until {:?}", server_state.writer_wait_until),
                format!("upgrade {:?}", server_state.upgrade.map(|(_, owner)| scenario.owners[owner])),
                format!(
                    "writer_left {:?}, token {:?}, counter {:?}",
                    server_state.writer_left, server_state.token, server_state.counter
                ),
                format!("ended {:?}, places {:?}", server_state.ended, server_state.queue),
            ]
        };
        let both = parts(self).into_iter().zip(parts(other)).filter(|(was, is)| was != is);
        both.map(|(was, is)| format!("{was} -> {is}")).collect::<Vec<_>>().join("; ")
    }

    /// Expires the two marks without a live waiter. A waiter extends them with every poll, for the
    /// length of its claim.
    pub fn lapse(&mut self, scenario: &Scenario) {
        let writers = self.waiters(scenario, true);
        if writers.is_empty() {
            self.writer_wait_until = self.writer_wait_until.map(|_| false);
        }
        let upgrades = |owner| writers.iter().any(|one| scenario.attempts[*one].owner == owner);
        self.upgrade = self.upgrade.map(|(live, owner)| (live && upgrades(owner), owner));
    }

    /// Appends what distinguishes this state from others: no times and no tokens, only their order.
    pub fn outline(&self, scenario: &Scenario, outline: &mut Vec<u8>) {
        let mut hold = |hold: &Option<Hold>| {
            if let Some(hold) = hold {
                outline.extend([b'L' + u8::from(hold.is_live), hold.owner as u8]);
                let mut attempts: Vec<u8> = hold.attempts.iter().map(|one| *one as u8).collect();
                attempts.sort_unstable();
                outline.extend(attempts);
            }
            outline.push(255);
        };
        hold(&self.write);
        self.reads.iter().for_each(&mut hold);
        outline.push(self.mode as u8);
        outline.push(self.readers.map_or(255, |readers| readers as u8));
        outline.push(self.writer_wait_until.map_or(255, u8::from));
        outline.push(self.upgrade.map_or(255, |(live, owner)| 2 * owner as u8 + u8::from(live)));
        outline.push(match (self.token, self.counter) {
            (None, None) => 0,
            (None, Some(_)) => 1,
            (token, counter) if token == counter => 2,
            _ => 3,
        });
        for (one, place) in &self.queue {
            let first =
                !scenario.attempts[*one].writes && self.writer_left.is_some_and(|left| *place <= left);
            let alive = u8::from(self.is_alive(*one)) + u8::from(self.seen[*one]);
            outline.extend([*one as u8, u8::from(*place == UPGRADES), u8::from(first), alive]);
        }
    }
}
