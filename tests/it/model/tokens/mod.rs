//! A model of the protocol for a quorum's fencing tokens: a search of every state that a few
//! attempts can bring three nodes to. Mutants of the protocol, which look as good, must fail.
//!
//! The protocol is strict accept: an attempt proposes a number, a node accepts it if it is the
//! largest so far, and a majority makes it the token. It promises:
//! - An attempt that began after another one had finished has the larger token.
//! - No two writers have the same token.
//! - A reader's token is not smaller than that of any writer that had finished before, and smaller
//!   than that of every writer that begins later.
//!
//! The model assumes nothing about clocks: requests arrive in any order, a lease may expire at any
//! step, and any number may be proposed. `protocols` has the protocols as data, `steps` the
//! possible steps, `search` the promises and the loop.
//!
//! `REDLATCH_MODEL=1` widens the bounds: two minutes. The search leaves out: more nodes, two nodes
//! that lose their data at once, keys that an old snapshot brings back, an attempt that proposes a
//! second number under the same name, and nodes that forget the numbers of unused names.

mod protocols;
mod search;
mod state;
mod steps;

use std::time::Instant;

use protocols::{DURABLE, MUTANTS, Outcome, READERS, REJOIN, Recreate, Rules};
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
                let mut what = wrong_coverage(rules, &size);
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

/// The events that the rules require and the search has not met, or the reverse.
fn wrong_coverage(rules: &Rules, size: &Size) -> Vec<&'static str> {
    let (writers, readers) = (rules.attempts.contains('w'), rules.attempts.contains('r'));
    let checks = [
        ("acquisitions", size.acquired > 0, true),
        ("writes after another acquisition", size.in_turn[0] > 0, writers),
        ("reads after another acquisition", size.in_turn[1] > 0, writers && readers),
        ("late requests", size.lost_replies > 0, true),
        ("second rounds", size.taken > 0, readers),
        ("re-creations", size.recreated > 0, rules.recreate != Recreate::Never),
        ("crashes", size.crashed > 0, rules.crashes > 0),
        ("nodes that waited", size.waited > 0, rules.crashes > 0),
        ("nodes that copied", size.copied > 0, rules.crashes > 0),
    ];
    checks.into_iter().filter(|(_, is, must)| is != must).map(|(what, ..)| what).collect()
}

#[test]
fn tokens_grow_and_are_unique_on_durable_nodes() {
    hold(DURABLE);
}

#[test]
fn tokens_of_readers_are_between_those_of_writers() {
    hold(READERS);
}

#[test]
fn tokens_grow_and_are_unique_after_node_loses_data_and_rejoins() {
    hold(REJOIN);
}

#[test]
fn tokens_search_finds_every_mutant() {
    judge(MUTANTS);
}
