//! A search of every state that a few clients can bring a read-write lock to. It runs the real
//! scripts on a server.
//!
//! In each state, the search sends each request that may arrive there, late ones too, and each of
//! them twice; and it lets each expiry pass. `invariants` has the rules that hold after every step,
//! `drain` checks that no client waits for ever. Mutants of the scripts must break a rule.
//!
//! The claim of each waiter may pass without a request: then the waiter is dead, unless it polls
//! later.
//!
//! `REDLATCH_MODEL=1` begins one more attempt and goes one step further than an ordinary run: some
//! minutes. The search leaves out: limits and large numbers, a lost queue or counter, and foreign
//! values in the keys other than entries of the queue.

mod clients;
mod drain;
mod invariants;
mod lock_state;
mod mutants;
mod search;
mod state_scripts;
mod steps;

use std::time::Instant;

pub use clients::more;
use clients::{Fencing, Scenario};
use search::Search;
use state_scripts::Script;

use super::Violation;
use crate::support::Server;

/// Small ones first.
fn small_scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("a reader and a writer", 2, "A:r1 B:w2"),
        Scenario::new("the same, with late requests", 2, "A:r1! B:w2!"),
        Scenario::new("the same, beside other entries of the queue", 2, "A:r1! B:w2!").beside_others(),
        Scenario::new("the same, without fencing", 2, "A:r1! B:w2!").fenced(Fencing::Off),
        Scenario::new("an owner that writes twice", 3, "A:w1 A:w2 B:r3"),
        Scenario::new("an owner on both sides, twice", 4, "A:r1 A:r2 A:w3 A:w4"),
        Scenario::new("two owners that no message reaches", 4, "A:r1? A:w2? B:r3? B:w4?"),
        Scenario::new("two owners, three attempts", 3, "A:r1 A:w2 B:r3 B:w4"),
    ]
}

fn two_owners() -> Scenario {
    Scenario::new("two owners", 4, "A:r1 A:w2 B:r3 B:w4").all_alive()
}

/// The scenarios of an ordinary search. They suffice to find the mutants.
fn scenarios() -> impl Iterator<Item = Scenario> {
    small_scenarios().into_iter().chain([two_owners()])
}

fn large_scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("readers, one of which upgrades without messages", 4, "A:r1 A:w2? B:r3 -:r4"),
        Scenario::new("two owners and a stranger, all at once", 5, "A:r1 A:w2! B:r3 B:w4 -:r5").within(6),
    ]
}

fn largest_scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("an owner beside a stranger", 4, "A:r1 A:w2 -:r3 -:w4"),
        Scenario::new(
            "an owner with late requests beside a stranger without messages",
            3,
            "A:r1! A:w2! -:r3? -:w4?",
        ),
        Scenario::new("two owners and a stranger", 3, "A:r1 A:w2 B:r3 B:w4 -:r5 -:w6"),
    ]
}

struct Harness {
    server: Server,
}

impl Harness {
    async fn open() -> Harness {
        let server = Server::start().await;
        Harness { server }
    }

    async fn load(&self, change: impl Fn(String) -> String) -> Script {
        Script::load(&self.server, change).await
    }

    /// Searches and drains all states, and returns the size of the search.
    async fn search(&self, scenario: &Scenario, script: &Script) -> Result<String, Violation> {
        let start = Instant::now();
        let search = Search::run(scenario, &self.server.connection().await, script).await?;
        // The last states of a bounded search have no known next states.
        let drained = if scenario.steps == usize::MAX { search.drain()? } else { 0 };
        let (states, requests) = (search.nodes.len(), search.requests);
        Ok(format!("{states} states, {requests} requests, {drained} drained, {:?}", start.elapsed()))
    }
}

async fn search_all(scenarios: impl IntoIterator<Item = Scenario>) {
    let harness = Harness::open().await;
    let script = harness.load(|text| text).await;
    let mut broken = String::new();
    for scenario in scenarios {
        let bounds =
            format!("{}, {} of {} attempts", scenario.title, scenario.begun, scenario.attempts.len());
        match harness.search(&scenario, &script).await {
            Ok(size) => println!("{bounds}: {size}"),
            Err(found) => broken += &format!("{bounds}:\n{found}\n"),
        }
    }
    assert!(broken.is_empty(), "{broken}");
}

#[tokio::test(flavor = "multi_thread")]
async fn model_rwlock_standalone_excludes_loses_nothing_and_never_sticks() {
    search_all(scenarios().chain(large_scenarios())).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn model_rwlock_standalone_largest_scenarios_exclude_lose_nothing_and_never_stick() {
    search_all(largest_scenarios()).await;
}

/// Searches with proposed tokens, as one node of a quorum.
async fn search_for_quorums(scenarios: impl IntoIterator<Item = Scenario>) {
    let harness = Harness::open().await;
    let script = harness.load(|text| text).await;
    for scenario in scenarios.into_iter().map(Scenario::on_quorum) {
        let size = harness
            .search(&scenario, &script)
            .await
            .unwrap_or_else(|found| panic!("{}:\n{found}", scenario.title));
        println!("{}: {size}", scenario.title);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn model_rwlock_scripts_for_quorums_exclude_lose_nothing_and_never_stick() {
    search_for_quorums(small_scenarios()).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn model_rwlock_scripts_for_quorums_with_two_owners_exclude_lose_nothing_and_never_stick() {
    search_for_quorums([two_owners()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn model_rwlock_standalone_search_finds_every_mutant() {
    let harness = Harness::open().await;
    let mut missed = Vec::new();
    for mutant in mutants::ALL {
        let script = harness.load(|text| mutant.apply(text)).await;
        let mut found = None;
        for scenario in scenarios() {
            if let Err(broken) = harness.search(&scenario, &script).await {
                found = Some(broken);
                break;
            }
        }
        match found {
            Some(found) => println!("{}: found in {} steps\n{found}", mutant.name, found.way.len()),
            None => missed.push(mutant.name),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
