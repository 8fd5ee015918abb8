//! The state of a lock on a server, and its parser.

use super::clients::Scenario;
use super::state_scripts::OTHERS;

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

impl ParsedState {
    /// Parses the answer of [`Tools::look`](super::state_scripts::Tools::look). `Err`: a rule that
    /// the state breaks.
    pub fn read(scenario: &Scenario, instant: i64, text: &str) -> Result<ParsedState, String> {
        let mut server_state = ServerState::new(scenario);
        let mut lasting = Vec::new();
        let mut others = 0;
        let mut lines = text.split('\n');
        match lines.next() {
            Some("") => {}
            complaint => return Err(complaint.unwrap_or_default().to_owned()),
        }
        for line in lines {
            let mut words = line.split(' ');
            let (name, value) = (words.next().unwrap(), words.next().unwrap());
            let number = || value.parse::<f64>().unwrap() as i64;
            let live = value != "over";
            let mut hold = |owner, words: std::str::Split<'_, char>| {
                let attempts: Vec<usize> = words.map(|word| scenario.attempt(word)).collect();
                if value == "long" {
                    lasting.extend(&attempts);
                }
                Hold { is_live: live, owner, attempts }
            };
            match name {
                "mode" => server_state.mode = Mode::Several,
                "write" => {
                    let owner = scenario.owner(words.next().unwrap());
                    server_state.write = Some(hold(owner, words));
                }
                "sole" => {
                    let (side, owner) = (words.next().unwrap(), scenario.owner(words.next().unwrap()));
                    let hold = Some(hold(owner, words));
                    server_state.mode = Mode::Sole;
                    if side == "read" {
                        server_state.reads[owner] = hold
                    } else {
                        server_state.write = hold
                    }
                    if side == "read" {
                        server_state.token = Some(0);
                    }
                }
                "readers" => server_state.readers = Some(number()),
                "writer_wait_until" => server_state.writer_wait_until = Some(live),
                "upgrade" => server_state.upgrade = Some((live, scenario.owner(words.next().unwrap()))),
                "writer_left" => server_state.writer_left = Some(number() - instant),
                "token" => server_state.token = Some(number()),
                "counter" => server_state.counter = Some(number()),
                "queued" | "seen" | "ended"
                    if scenario.others && OTHERS.iter().any(|entry| line.contains(entry)) =>
                {
                    others += 1;
                }
                "queued" => {
                    let entry = line.splitn(3, ' ').nth(2).unwrap();
                    let one = scenario.attempt(words.next().unwrap());
                    let score = number();
                    let place = match (scenario.attempts[one].writes, score) {
                        (true, 0) => UPGRADES,
                        (true, 1..) => score - instant,
                        (false, ..0) => score + LANE - instant,
                        _ => return Err(format!("an impossible place: {line}")),
                    };
                    if entry != scenario.waiter(one) {
                        return Err(format!("an unknown waiter: {line}"));
                    }
                    server_state.queue.push((one, place));
                }
                "seen" => server_state.seen[scenario.attempt(value)] = true,
                // The marks of force requests, each of which is an attempt of its own.
                "ended" if value == "f" => {}
                "ended" => {
                    server_state.ended[scenario.attempt(value)] = Some(words.next().unwrap().parse().unwrap())
                }
                _ => match name.strip_prefix("read:") {
                    Some(owner) => {
                        let owner = scenario.owner(owner);
                        server_state.reads[owner] = Some(hold(owner, words));
                    }
                    None => return Err(format!("an unknown field: {line}")),
                },
            }
        }
        if server_state.mode == Mode::Sole {
            if server_state.write.is_none() {
                // The counter is stored once there is a second hold.
                server_state.token = server_state.token.and(server_state.counter);
            }
            if !server_state.queue.is_empty() {
                return Err("attempts wait beside a sole hold".to_owned());
            }
        }
        if scenario.others && others != OTHERS.len() {
            return Err("an entry of another kind, or a mark of another attempt, was removed".to_owned());
        }
        Ok(ParsedState { server_state, lasting })
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
