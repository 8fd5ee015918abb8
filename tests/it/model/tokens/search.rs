//! The search: takes every step from every state, until there are no new states.

use std::collections::HashSet;

use super::protocols::Rules;
use super::state::{BuildQuick, DONE, FINISHED, MOST, PHASE, READS, State, get};
use super::steps::Step;
use crate::model::Violation;

/// The size of a search, and counts of its steps.
#[derive(Debug, Default)]
pub struct Size {
    pub states: usize,
    pub steps: usize,
    pub acquired: usize,
    /// Acquisitions that began after another one had finished: of writers, of readers.
    pub in_turn: [usize; 2],
    pub lost_replies: usize,
    pub taken: usize,
    pub recreated: usize,
    pub crashed: usize,
    pub waited: usize,
    pub copied: usize,
}

impl Size {
    fn count(&mut self, before: &State, step: Step) {
        self.steps += 1;
        match step {
            Step::Acquire { one, .. } => {
                self.acquired += 1;
                let word = before.attempts[one];
                if get(word, FINISHED) != 0 {
                    self.in_turn[get(word, READS) as usize] += 1;
                }
            }
            Step::LostReply { .. } => self.lost_replies += 1,
            Step::Take { .. } => self.taken += 1,
            Step::Recreate { .. } => self.recreated += 1,
            Step::Crash { .. } => self.crashed += 1,
            Step::Wait { .. } => self.waited += 1,
            Step::Copy { .. } => self.copied += 1,
            Step::Begin { .. } | Step::Grant { .. } | Step::Expire { .. } => {}
        }
    }
}

/// A state, the state from which it was first reached, and the number of the step.
struct Visit {
    state: State,
    from: usize,
    step: usize,
}

/// Searches until a promise is broken or all states are known.
pub fn search(rules: &Rules) -> Result<Size, Violation> {
    let mut size = Size::default();
    let mut known = HashSet::with_hasher(BuildQuick::default());
    let (first, ..) = State::first(rules).sorted(rules);
    let mut reached = vec![Visit { state: first, from: 0, step: 0 }];
    known.insert(first);
    let (mut at, mut next) = (0, Vec::new());
    while at < reached.len() {
        let before = reached[at].state;
        before.steps(rules, &mut next);
        for (number, (step, after)) in next.drain(..).enumerate() {
            size.count(&before, step);
            if let Some(what) = broken(&before, step) {
                return Err(Violation { what, way: way(rules, &reached, at, number) });
            }
            let (state, ..) = after.sorted(rules);
            if known.insert(state) {
                reached.push(Visit { state, from: at, step: number });
            }
        }
        at += 1;
    }
    size.states = reached.len();
    Ok(size)
}

/// The promise that this step breaks, if any.
fn broken(before: &State, step: Step) -> Option<String> {
    let Step::Acquire { one, token } = step else { return None };
    let (finished, reads) = (get(before.attempts[one], FINISHED), get(before.attempts[one], READS) == 1);
    if reads {
        return (token < finished)
            .then(|| format!("a writer that had finished before this reader began has {finished}"));
    }
    if token <= finished {
        return Some(format!("an attempt that had finished before this writer began has {finished}"));
    }
    let same = |other: &u32| get(*other, PHASE) == DONE && get(*other, READS) == 0;
    let mut others = (0..MOST).filter(|other| same(&before.attempts[*other]));
    others.any(|other| before.token(other) == token).then(|| format!("another writer has {token} as well"))
}

/// Describes the steps to a state, and one more. Attempts and nodes are sorted in each state, so
/// the steps are repeated to follow each of them.
fn way(rules: &Rules, reached: &[Visit], mut at: usize, last: usize) -> Vec<String> {
    let mut numbers = vec![last];
    while at != 0 {
        numbers.push(reached[at].step);
        at = reached[at].from;
    }
    let mut state = reached[0].state;
    let (mut attempts, mut nodes) = ([0, 1, 2, 3], [0, 1, 2, 3]);
    let mut way = Vec::new();
    for number in numbers.into_iter().rev() {
        let mut next = Vec::new();
        state.steps(rules, &mut next);
        let (step, after) = next[number];
        let letter = |one: usize| char::from(b'A' + attempts[one] as u8);
        let name = |one: usize| {
            let kind = if get(state.attempts[one], READS) == 1 { "reader" } else { "writer" };
            format!("{kind} {}", letter(one))
        };
        way.push(step.describe(name, |node: usize| format!("node {}", nodes[node] + 1)));
        let (sorted, from_attempts, from_nodes) = after.sorted(rules);
        attempts = from_attempts.map(|from| attempts[from]);
        nodes = from_nodes.map(|from| nodes[from]);
        state = sorted;
    }
    way
}
