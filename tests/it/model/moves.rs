//! What can happen to a lock: requests, each of them at any time, and ends that pass.

use redis::Cmd;

use super::cast::Cast;
use super::lock::Kept;

/// What a client believes about an attempt of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belief {
    Idle,
    /// It was told that the lock is busy, or knows nothing.
    Waits,
    /// Under this token.
    Reads(i64),
    Writes(i64),
    /// Its hold was taken away, or was over.
    Lost,
    /// It was told that to wait would be a deadlock.
    Refused,
    /// Given back, or given up.
    Done,
    /// The same, for good.
    Ended,
}
use Belief::{Done, Ended, Idle, Lost, Reads, Refused, Waits, Writes};

impl Belief {
    pub fn holds(self) -> bool {
        matches!(self, Reads(_) | Writes(_))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub kept: Kept,
    pub beliefs: Vec<Belief>,
    /// The token of the last who wrote.
    pub written: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Asks once, without a place in the queue.
    Try(usize),
    /// Asks, and queues.
    Ask(usize),
    /// The same request, but its client hears no answer.
    Unheard(usize),
    Release(usize),
    /// The same, with the place in the queue.
    Leave(usize),
    Renew(usize),
    Downgrade(usize),
    ForceReaders,
    ForceWriter,
    /// The end of a hold passes.
    WriteOver,
    ReadOver(usize),
    /// The ends of two marks pass.
    GateOver,
    UpgradeOver,
    /// The lock's own ttl passes: nothing in it was still to come.
    KeyOver,
}

/// One integer, or a busy lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Final(i64),
    Busy,
}

/// Longer than any search.
const TTL: &str = "3600000";

/// The scripts that are searched.
pub const SCRIPTS: [&str; 7] =
    ["read_acquire", "write_acquire", "release", "renew", "downgrade", "read_force", "write_force"];

/// Their names in a server.
#[derive(Debug)]
pub struct Sums(pub Vec<String>);

impl Move {
    pub fn is_request(self) -> bool {
        use Move::{GateOver, KeyOver, ReadOver, UpgradeOver, WriteOver};
        !matches!(self, WriteOver | ReadOver(_) | GateOver | UpgradeOver | KeyOver)
    }

    /// What is sent; `None` for time that passes.
    pub fn request(self, cast: &Cast, sums: &Sums) -> Option<Cmd> {
        let keys = &cast.keys;
        let send = |script: &str, keys: &[&String], arguments: &[&str]| {
            let mut cmd = redis::cmd("EVALSHA");
            let sum = &sums.0[SCRIPTS.iter().position(|name| *name == script).unwrap()];
            cmd.arg(sum).arg(keys.len()).arg(keys).arg(arguments);
            Some(cmd)
        };
        let all = |note: usize| [&keys[0], &keys[1], &keys[2], &keys[3 + note]];
        let names = |one: usize| (cast.owners[cast.attempts[one].owner], cast.attempts[one].name);
        let acquire = |one: usize, waiter: &str| {
            let (owner, name) = names(one);
            let script = if cast.attempts[one].writes { "write_acquire" } else { "read_acquire" };
            let arguments = [owner, name, TTL, "7", "9", waiter, "100"];
            send(script, &all(one), &arguments[..if cast.attempts[one].writes { 6 } else { 7 }])
        };
        match self {
            Move::Try(one) => acquire(one, ""),
            Move::Ask(one) | Move::Unheard(one) => acquire(one, &cast.attempts[one].waiter),
            Move::Release(one) | Move::Leave(one) => {
                let (owner, name) = names(one);
                let waiter = cast.attempts[one].waiter.as_str();
                match self {
                    _ if cast.attempts[one].doubted => {
                        send("release", &all(one), &[owner, name, "60000", "7", waiter])
                    }
                    Move::Leave(_) => send("release", &all(one)[..3], &[owner, name, "0", "7", waiter]),
                    _ => send("release", &all(one)[..3], &[owner, name, "0", "7"]),
                }
            }
            Move::Renew(one) => send("renew", &[&keys[0]], &[names(one).0, names(one).1, TTL]),
            Move::Downgrade(one) => {
                send("downgrade", &all(one)[..3], &[names(one).0, names(one).1, TTL, "7"])
            }
            Move::ForceReaders => send("read_force", &all(cast.attempts.len()), &["", "f", "60000", "7"]),
            Move::ForceWriter => send("write_force", &all(cast.attempts.len()), &["", "f", "60000", "7"]),
            _ => None,
        }
    }

    /// In words.
    pub fn tell(self, cast: &Cast, answer: Option<Answer>) -> String {
        let name = |one: usize| {
            let (owner, name) = (cast.owners[cast.attempts[one].owner], cast.attempts[one].name);
            if owner == name { name.to_owned() } else { format!("{owner}'s {name}") }
        };
        let what = match self {
            Move::Try(one) => format!("{} tries", name(one)),
            Move::Ask(one) => format!("{} asks", name(one)),
            Move::Unheard(one) => format!("{} asks, unheard or late", name(one)),
            Move::Release(one) => format!("{} is given back", name(one)),
            Move::Leave(one) => format!("{} gives up", name(one)),
            Move::Renew(one) => format!("{} is renewed", name(one)),
            Move::Downgrade(one) => format!("{} is downgraded", name(one)),
            Move::ForceReaders => "it is taken from the readers".to_owned(),
            Move::ForceWriter => "it is taken from the writer".to_owned(),
            Move::WriteOver => "the writer's time is over".to_owned(),
            Move::ReadOver(owner) => format!("the time of {} to read is over", cast.owners[owner]),
            Move::GateOver => "the gate's time is over".to_owned(),
            Move::UpgradeOver => "the upgrade's time is over".to_owned(),
            Move::KeyOver => "the key's time is over".to_owned(),
        };
        match answer {
            Some(Answer::Final(answer)) => format!("{what}: {answer}"),
            Some(Answer::Busy) => format!("{what}: busy"),
            None => what,
        }
    }
}

impl State {
    pub fn first(cast: &Cast) -> State {
        let reads = vec![None; cast.owners.len()];
        let notes = vec![None; cast.attempts.len()];
        State {
            kept: Kept { reads, notes, ..Kept::default() },
            beliefs: vec![Idle; cast.attempts.len()],
            written: 0,
        }
    }

    /// What can happen next; and what can arrive, late or once more, but must change nothing.
    pub fn moves(&self, cast: &Cast) -> (Vec<Move>, Vec<Move>) {
        let (mut moves, mut idle) = (Vec::new(), Vec::new());
        let begun = self.beliefs.iter().filter(|belief| **belief != Idle).count();
        for (one, attempt) in cast.attempts.iter().enumerate() {
            match self.beliefs[one] {
                Idle if begun == cast.begun => {}
                Idle => {
                    moves.extend([Move::Try(one), Move::Ask(one)]);
                    moves.extend(attempt.doubted.then_some(Move::Unheard(one)));
                }
                Waits => {
                    moves.extend([Move::Ask(one), Move::Leave(one)]);
                    moves.extend(attempt.doubted.then_some(Move::Unheard(one)));
                }
                Writes(_) => {
                    moves.extend([Move::Release(one), Move::Downgrade(one), Move::Unheard(one)]);
                    idle.push(Move::Renew(one));
                }
                Reads(_) => {
                    moves.push(Move::Release(one));
                    idle.push(Move::Renew(one));
                    if attempt.writes {
                        idle.push(Move::Downgrade(one));
                    }
                    moves.extend((attempt.doubted || !attempt.writes).then_some(Move::Unheard(one)));
                }
                Lost | Refused => {
                    let leaves = self.beliefs[one] == Refused;
                    moves.push(if leaves { Move::Leave(one) } else { Move::Release(one) });
                    idle.push(Move::Renew(one));
                    moves.extend(attempt.doubted.then_some(Move::Unheard(one)));
                }
                Done => {
                    moves.push(Move::Release(one));
                    idle.push(Move::Renew(one));
                    idle.extend(attempt.writes.then_some(Move::Downgrade(one)));
                }
                Ended => idle.extend([Move::Unheard(one), Move::Release(one)]),
            }
        }
        let kept = &self.kept;
        if kept.writes().is_some() {
            moves.extend([Move::WriteOver, Move::ForceWriter]);
        }
        let readers = (0..cast.owners.len()).filter(|owner| kept.reads(*owner).is_some());
        moves.extend(readers.clone().map(Move::ReadOver));
        moves.extend(readers.clone().next().map(|_| Move::ForceReaders));
        moves.extend((kept.gate == Some(true)).then_some(Move::GateOver));
        moves.extend(kept.upgrade.is_some_and(|(live, _)| live).then_some(Move::UpgradeOver));
        let empty = kept.write.is_none() && kept.reads.iter().all(Option::is_none);
        let marks = kept.readers.is_some() || kept.phase.is_some() || kept.gate.is_some();
        moves.extend((kept.is_free() && (!empty || marks)).then_some(Move::KeyOver));
        (moves, idle)
    }

    /// Time passes.
    pub fn pass(&self, cast: &Cast, passes: Move) -> State {
        let mut next = self.clone();
        let kept = &mut next.kept;
        let over = match passes {
            Move::WriteOver => kept.write.as_mut(),
            Move::ReadOver(owner) => kept.reads[owner].as_mut(),
            _ => None,
        };
        if let Some(hold) = over {
            hold.live = false;
            for one in &hold.attempts {
                if next.beliefs[*one].holds() {
                    next.beliefs[*one] = Lost;
                }
            }
        }
        match passes {
            Move::GateOver => kept.gate = Some(false),
            Move::UpgradeOver => kept.upgrade = kept.upgrade.map(|(_, owner)| (false, owner)),
            Move::WriteOver | Move::ReadOver(_) if !kept.sole => {}
            _ => {
                let (queue, notes) = (std::mem::take(&mut kept.queue), std::mem::take(&mut kept.notes));
                let (counter, reads) = (kept.counter, vec![None; cast.owners.len()]);
                *kept = Kept { queue, notes, counter, reads, ..Kept::default() };
            }
        }
        next
    }

    /// Who lost a hold of which nothing is left, and has nothing under way, is as good as done.
    pub fn settle(&mut self, cast: &Cast) {
        for (one, belief) in self.beliefs.iter_mut().enumerate() {
            let settled = !cast.attempts[one].doubted && !self.kept.names(one);
            if settled && matches!(belief, Lost | Refused) {
                *belief = Done;
            }
        }
    }

    /// What tells this state from others.
    pub fn outline(&self) -> Vec<u8> {
        let mut outline = Vec::with_capacity(64);
        for belief in &self.beliefs {
            outline.push(match belief {
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
        self.kept.outline(&mut outline);
        outline
    }
}
