//! Every state that a few attempts can bring three nodes to, under the protocol that fencing tokens of a quorum
//! are to come from; and under protocols that look as good, and are not.
//!
//! The protocol is strict accept: an attempt proposes a number, a node takes it if it is the largest so far, and
//! a majority makes it the token. What is promised: an attempt that began after another one had finished has the
//! larger token, and no two writers share one. A reader's is not smaller than that of any writer that had
//! finished before, and smaller than that of every writer that begins later.
//!
//! No clock is trusted: any order of arrival, a lease may be over at any step, any number may be proposed.
//! `rules` has the protocols as data, `steps` what can happen, `search` the promises and the one loop.
//!
//! `REDLATCH_MODEL=1` widens the bounds: two minutes. What is not searched: more nodes, two that lose their
//! memory at once, keys that an old snapshot brings back, an attempt that proposes a second number under the
//! same name, and nodes that forget the numbers of names nobody uses.

mod rules;
mod search;
mod state;
mod steps;

use std::time::Instant;

use rules::{DURABLE, MUTANTS, Outcome, READERS, REJOIN, Recreate, Rules};
use search::{Size, search};

use crate::model::more;

fn hold(lists: [&[Rules]; 2]) {
    judge(&lists[..lists.len().min(1 + more())].concat());
}

fn judge(list: &[Rules]) {
    let mut wrong = String::new();
    for rules in list {
        let start = Instant::now();
        let title = format!("{}, {} up to {}", rules.title, rules.attempts, rules.proposals);
        match (search(rules), rules.outcome) {
            (Ok(size), Outcome::Holds(states)) => {
                println!("{title}: {:?}, {size:?}", start.elapsed());
                let mut what = amiss(rules, &size);
                what.extend((size.states != states).then_some("another number of states"));
                if !what.is_empty() {
                    wrong += &format!("{title}: {what:?}: {size:?}\n");
                }
            }
            (Err(found), Outcome::Breaks(steps)) => {
                println!("{title}: {:?}, broken in {} steps\n{found}", start.elapsed(), found.way.len());
                if found.way.len() != steps {
                    wrong += &format!("{title}: not {steps} steps\n{found}\n");
                }
            }
            (Ok(size), Outcome::Breaks(_)) => wrong += &format!("{title}: not found: {size:?}\n"),
            (Err(found), Outcome::Holds(_)) => wrong += &format!("{title}:\n{found}\n"),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A search that finds nothing must have seen all that its rules are about.
fn amiss(rules: &Rules, size: &Size) -> Vec<&'static str> {
    let (writers, readers) = (rules.attempts.contains('w'), rules.attempts.contains('r'));
    let checks = [
        ("who has the lock", size.acquired > 0, true),
        ("who writes after another one", size.in_turn[0] > 0, writers),
        ("who reads after another one", size.in_turn[1] > 0, writers && readers),
        ("late requests", size.unheard > 0, true),
        ("second rounds", size.taken > 0, readers),
        ("re-creations", size.recreated > 0, rules.recreate != Recreate::Never),
        ("crashes", size.crashed > 0, rules.crashes > 0),
        ("nodes that waited", size.waited > 0, rules.crashes > 0),
        ("nodes that copied", size.copied > 0, rules.crashes > 0),
    ];
    checks.into_iter().filter(|(_, is, must)| is != must).map(|(what, ..)| what).collect()
}

#[test]
fn tokens_grow_and_are_unique_on_nodes_that_forget_nothing() {
    hold(DURABLE);
}

#[test]
fn tokens_of_readers_are_between_those_of_writers() {
    hold(READERS);
}

#[test]
fn tokens_grow_and_are_unique_when_a_node_forgets_and_rejoins() {
    hold(REJOIN);
}

#[test]
fn tokens_finds_every_mutant() {
    judge(MUTANTS);
}
