//! The state of nodes and attempts, in a few words of memory.

use std::hash::{BuildHasherDefault, Hash, Hasher};

use super::protocols::Rules;

/// The most nodes, and the most attempts.
pub const MOST: usize = 4;

/// Fields of four bits each. A node's first fields are its answers to each attempt, as the attempt
/// has received them: 0, or one more than the number. Sorting the nodes moves the answers along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub nodes: [u32; MOST],
    pub attempts: [u32; MOST],
    /// The number of crashes that may still happen.
    pub crashes: u32,
}

/// Of a node, its holder: [`FREE`], [`SHARED`], or one more than the index of a writer.
pub const HELD: usize = 4;
/// The largest number that the node accepted.
pub const MAX: usize = 5;
/// 0 if the node votes, otherwise one more than the number of repair steps that it has done.
pub const REPAIRS: usize = 6;
/// Whether a node that lost its data has copied from this one.
pub const COPIED: usize = 7;

/// Of an attempt: one of the phases below.
pub const PHASE: usize = 0;
/// The number that the attempt proposes.
pub const SENDS: usize = 1;
/// The number that the attempt takes after the answers, if it is not the proposed one.
pub const TAKES: usize = 2;
/// The largest token of the acquisitions that had finished when the attempt began.
pub const FINISHED: usize = 3;
pub const READS: usize = 4;

pub const FREE: u32 = 0;
/// Held by readers: which ones, and how many, never matters.
pub const SHARED: u32 = 15;

pub const IDLE: u32 = 0;
pub const FIRST: u32 = 1;
pub const SECOND: u32 = 2;
pub const DONE: u32 = 3;
/// The attempt cannot succeed any more, but its requests may still be in flight.
pub const OVER: u32 = 4;

/// As an answer: the request is no longer in flight, and its answer does not matter.
pub const ARRIVED: u32 = 15;

pub fn get(word: u32, field: usize) -> u32 {
    word >> (field * 4) & 15
}

pub fn set(word: &mut u32, field: usize, value: u32) {
    assert!(value <= 15, "{value} needs more than four bits");
    *word = *word & !(15 << (field * 4)) | value << (field * 4);
}

impl State {
    pub fn first(rules: &Rules) -> State {
        let mut state = State { crashes: rules.crashes, ..State::default() };
        for (word, kind) in state.attempts.iter_mut().zip(rules.attempts.bytes()) {
            set(word, READS, u32::from(kind == b'r'));
        }
        state
    }

    /// The number of nodes that have answered with an accepted number.
    pub fn answered(&self, one: usize, is_accepted: impl Fn(u32) -> bool) -> usize {
        let answers = self.nodes.iter().map(|node| get(*node, one));
        answers.filter(|answer| *answer != 0 && is_accepted(*answer - 1)).count()
    }

    pub fn token(&self, one: usize) -> u32 {
        let word = self.attempts[one];
        if get(word, TAKES) != 0 { get(word, TAKES) } else { get(word, SENDS) }
    }

    /// The largest token of a finished acquisition. For readers, only those of writers count.
    pub fn finished(&self, of_writers: bool) -> u32 {
        let counts = |one: &usize| {
            get(self.attempts[*one], PHASE) == DONE && !(of_writers && get(self.attempts[*one], READS) == 1)
        };
        (0..MOST).filter(counts).map(|one| self.token(one)).max().unwrap_or(0)
    }

    /// Ends an attempt with success or failure, and drops the answers that it has received.
    pub fn end(&mut self, one: usize, phase: u32, rules: &Rules) {
        set(&mut self.attempts[one], PHASE, phase);
        set(&mut self.attempts[one], FINISHED, 0);
        for node in &mut self.nodes {
            if get(*node, one) != 0 {
                set(node, one, if rules.twice { 0 } else { ARRIVED });
            }
        }
    }

    /// The same state with sorted nodes and attempts, since they are interchangeable; and the
    /// previous index of each attempt and each node. Ties may be left in either order: then two
    /// states stand for one.
    pub fn sorted(&self, rules: &Rules) -> (State, [usize; MOST], [usize; MOST]) {
        let mut state = *self;
        let mut keys = [0; MOST];
        for (one, key) in keys.iter_mut().enumerate() {
            // A sum over the nodes, so that their order does not matter.
            let mut known = 0_u64;
            for node in self.nodes {
                let held = u64::from(get(node, HELD) == one as u32 + 1);
                let what = u64::from(get(node, one) << 8 | get(node, MAX) << 4) + held + 1;
                known = known.wrapping_add(what * what * what);
            }
            *key = u64::from(self.attempts[one]) << 40 | known & 0xff_ffff_ffff;
        }
        let attempts = order(&mut keys, rules.attempts.len());
        if attempts != [0, 1, 2, 3] {
            for (to, from) in attempts.into_iter().enumerate() {
                state.attempts[to] = self.attempts[from];
                for (node, before) in state.nodes.iter_mut().zip(self.nodes) {
                    set(node, to, get(before, from));
                    if get(before, HELD) == from as u32 + 1 {
                        set(node, HELD, to as u32 + 1);
                    }
                }
            }
        }
        let nodes = order(&mut state.nodes, rules.nodes);
        (state, attempts, nodes)
    }
}

/// Sorts the first few words, and returns their previous indices. The ordinary sort takes much
/// longer in a debug build.
fn order<T: Copy + PartialOrd>(words: &mut [T; MOST], few: usize) -> [usize; MOST] {
    let mut from = [0, 1, 2, 3];
    for end in 1..few {
        let mut at = end;
        while at > 0 && words[at - 1] > words[at] {
            words.swap(at - 1, at);
            from.swap(at - 1, at);
            at -= 1;
        }
    }
    from
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        for words in [self.nodes, self.attempts] {
            for two in 0..2 {
                hasher.write_u64(u64::from(words[two * 2]) << 32 | u64::from(words[two * 2 + 1]));
            }
        }
        hasher.write_u64(u64::from(self.crashes));
    }
}

/// A fast hasher; it does not resist chosen keys, and the keys here are not chosen.
#[derive(Default)]
pub struct Quick(u64);

pub type BuildQuick = BuildHasherDefault<Quick>;

impl Hasher for Quick {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a state is hashed in whole words")
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
