//! The search: takes every step from every state, until there are no new states.

use std::collections::{HashMap, VecDeque};

use redis::aio::MultiplexedConnection;
use redis::{Pipeline, Value};

use super::clients::Scenario;
use super::invariants::{consistent, judge, judge_idle};
use super::lock_state::ParsedState;
use super::state_scripts::{LOOKS, Script, instant, look, place};
use super::steps::{Answer, Move, State};
use crate::model::Violation;
use crate::support::raw::only;

/// The number of states whose requests are sent at a time.
const BATCH: usize = 64;

/// A state, how it was first reached, and its next states.
#[derive(Debug)]
pub struct Node {
    pub state: State,
    depth: usize,
    came: Option<(usize, Move, Option<Answer>)>,
    pub steps: Vec<(Move, usize)>,
}

/// All states that a scenario can reach.
#[derive(Debug)]
pub struct Search<'a> {
    pub scenario: &'a Scenario,
    pub nodes: Vec<Node>,
    /// The number of requests judged.
    pub requests: usize,
    known: HashMap<Vec<u8>, usize>,
}

impl<'a> Search<'a> {
    /// Searches until a rule is broken or all states are known.
    pub async fn run(
        scenario: &'a Scenario,
        connection: &MultiplexedConnection,
        script: &Script,
    ) -> Result<Search<'a>, Violation> {
        let mut search = Search { scenario, nodes: Vec::new(), requests: 0, known: HashMap::new() };
        search.reach(State::first(scenario), None);
        let (mut next, mut in_flight) = (0, VecDeque::new());
        let mut judged = Ok(());
        loop {
            // The server runs one batch while the answers of another are judged.
            while judged.is_ok() && in_flight.len() < 2 {
                let end = search.nodes.len().min(next + BATCH);
                let instant = instant();
                let batch: Vec<usize> =
                    (next..end).filter(|at| search.nodes[*at].depth < scenario.steps).collect();
                next = end;
                if batch.is_empty() {
                    break;
                }
                let mut pipe = redis::pipe();
                for at in &batch {
                    search.ask(*at, instant, &mut pipe, script);
                }
                let mut connection = connection.clone();
                let answers = async move { pipe.query_async::<Vec<Value>>(&mut connection).await };
                in_flight.push_back((batch, instant, tokio::spawn(answers)));
            }
            // No request may be in flight when this returns.
            let Some((batch, instant, answers)) = in_flight.pop_front() else { break };
            let mut values = answers.await.unwrap().expect("the server answers").into_iter();
            for at in batch {
                judged = judged.and_then(|()| search.explore(at, instant, &mut values));
            }
        }
        judged.map(|()| search)
    }

    /// Adds all requests of a state to the batch: each one twice, and a read of the state after
    /// each.
    fn ask(&self, at: usize, instant: i64, pipe: &mut Pipeline, script: &Script) {
        let state = &self.nodes[at].state;
        let (moves, idle) = state.moves(self.scenario);
        let request = |step: Move| step.request(self.scenario, script, state, instant).expect("a request");
        place(pipe, self.scenario, &state.server_state, instant);
        for step in idle {
            pipe.add_command(request(step));
            look(pipe);
        }
        for step in moves.into_iter().filter(|step| step.is_request()) {
            let request = request(step);
            place(pipe, self.scenario, &state.server_state, instant);
            for _ in 0..2 {
                pipe.add_command(request.clone());
                look(pipe);
            }
        }
    }

    /// Judges the outcomes of all steps from a state.
    fn explore(
        &mut self,
        at: usize,
        instant: i64,
        values: &mut impl Iterator<Item = Value>,
    ) -> Result<(), Violation> {
        let scenario = self.scenario;
        let state = self.nodes[at].state.clone();
        let (moves, idle) = state.moves(scenario);
        for step in idle {
            let answer = answer(instant, values.next());
            self.requests += 1;
            let seen = seen(scenario, instant, values);
            let judged = seen.and_then(|seen| judge_idle(scenario, &state, step, answer, &seen));
            judged.map_err(|what| self.found(at, Some((step, Some(answer))), what))?;
        }
        for step in moves {
            let (after, answered) = if step.is_request() {
                let mut delivered = || (answer(instant, values.next()), seen(scenario, instant, values));
                let (first, second) = (delivered(), delivered());
                self.requests += 2;
                let judged = match (first.1, second.1) {
                    (Ok(one), Ok(two)) => judge(scenario, &state, step, [first.0, second.0], [one, two]),
                    (one, two) => one.and(two).map(|_| unreachable!("both were seen")),
                };
                (judged, Some(first.0))
            } else {
                let after = state.pass(scenario, step);
                (consistent(scenario, &after).map(|()| after), None)
            };
            let after = after.map_err(|what| self.found(at, Some((step, answered)), what))?;
            let to = self.reach(after, Some((at, step, answered)));
            self.nodes[at].steps.push((step, to));
        }
        Ok(())
    }

    fn reach(&mut self, mut state: State, came: Option<(usize, Move, Option<Answer>)>) -> usize {
        state.simplify(self.scenario);
        let next = self.nodes.len();
        let at = *self.known.entry(state.outline(self.scenario)).or_insert(next);
        if at == next {
            let depth = came.map_or(0, |(from, ..)| self.nodes[from].depth + 1);
            self.nodes.push(Node { state, depth, came, steps: Vec::new() });
        }
        at
    }

    /// A broken rule with the path to a node and one more step.
    pub fn found(&self, mut at: usize, step: Option<(Move, Option<Answer>)>, what: String) -> Violation {
        let mut way = Vec::new();
        way.extend(step.map(|(step, answer)| step.describe(self.scenario, answer)));
        while let Some((from, step, answer)) = self.nodes[at].came {
            way.push(step.describe(self.scenario, answer));
            at = from;
        }
        way.reverse();
        Violation { what, way }
    }
}

fn answer(instant: i64, value: Option<Value>) -> Answer {
    match value.map(only) {
        Some(Value::Int(answer)) => Answer::Final(answer),
        Some(Value::Array(items)) => match &items[..] {
            [Value::Int(pttl), Value::Int(time)] if *pttl != -8 => Answer::Busy(time - instant),
            _ => panic!("a script answers {items:?}"),
        },
        other => panic!("a script answers {other:?}"),
    }
}

fn seen(
    scenario: &Scenario,
    instant: i64,
    values: &mut impl Iterator<Item = Value>,
) -> Result<ParsedState, String> {
    let replies = Value::Array(values.take(LOOKS).collect());
    ParsedState::read(scenario, instant, redis::from_redis_value(replies).unwrap())
}
