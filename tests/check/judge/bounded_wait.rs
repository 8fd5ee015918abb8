//! Rule "bounded wait": while nothing fails, a client has the lock once each client has had a turn.

use std::collections::HashMap;
use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict, holds};
use crate::clock::STEP;
use crate::history::{End, Event, EventKind, Mode, Time, Verb};
use crate::plan::{Fault, LOCAL_TURN, NODE_TIMEOUT, Plan, TTL};
use crate::run::Record;
use crate::support::Topology;
use crate::workload::LOCKS;

/// How much longer than one turn of each client a client may wait, for two actions that are due:
/// its task at the front asks for its place in the queue, and a timer ends the turn before it.
/// Without a mistake, no wait was seen that needs it.
const SLACK: Duration = PROMPT;

/// How long after a fault nothing is judged: all have asked again by then, and have their places.
/// Those that queued while the clock was ahead are behind all that queue in the time of the step.
fn after(fault: Fault) -> Duration {
    if fault.sets_clock() { TTL + STEP } else { TTL }
}

/// A part of a client's wait, and what it saw of the others.
struct Wait<'a> {
    waiter: &'a Hold,
    from: Time,
    to: Time,
    /// How long others are known to have held the lock.
    held: Duration,
    /// How long they may have held it.
    allowed: Duration,
}

/// Of a read-write lock, only the time of writers counts: the readers between them are few. And no
/// quorum, as in the rule "turn".
pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    if case.plan.topology.nodes() > 1 {
        return;
    }
    for (lock, _) in LOCKS {
        let holds = case.holds.iter().filter(|hold| hold.lock == lock && hold.is_outer_exclusive());
        let holds: Vec<&Hold> = holds.collect();
        let waiters = holds.iter().filter(|hold| hold.may_queue());
        let waits = waiters.flat_map(|waiter| waits(case, waiter, &holds));
        let Some(wait) = waits.max_by_key(|wait| wait.held.saturating_sub(wait.allowed)) else { continue };
        if wait.held > wait.allowed {
            let text = format!(
                "{} waited from {:.3} to {:.3} while others held the lock for {:?}: {:?} are allowed",
                case.describe(wait.waiter),
                case.when(wait.from),
                case.when(wait.to),
                wait.held,
                wait.allowed,
            );
            verdict.violates("bounded wait", text);
        }
    }
}

/// The parts of a wait without a fault.
fn waits<'a>(case: &Case<'_>, waiter: &'a Hold, holds: &[&Hold]) -> Vec<Wait<'a>> {
    // A request without an answer waited until the last line of its worker.
    let end = waiter.asked_until().unwrap_or(waiter.worker_ended);
    let from = since(waiter, holds, end);
    let parts = calm(case, from, end);
    parts.into_iter().map(|(from, to)| Wait::of(waiter, holds, from, to)).collect()
}

/// Since when the client waits: it had the lock before, or the place of a task ahead of this one,
/// which then gave up.
fn since(waiter: &Hold, holds: &[&Hold], end: Time) -> Time {
    let own = holds.iter().filter(|hold| hold.worker() == waiter.worker() && hold.number != waiter.number);
    let changes = own.filter_map(|hold| match hold.granted {
        Some(_) => hold.trusted_until(),
        // One of several locks is asked for at any time of the call.
        None if hold.wants <= waiter.wants || hold.verb == Verb::All => hold.asked_until(),
        None => None,
    });
    changes.filter(|at| *at <= end).fold(waiter.wants, Time::max)
}

/// The parts between two times in which no fault, and no stall of the machine, changes turns.
fn calm(case: &Case<'_>, from: Time, to: Time) -> Vec<(Time, Time)> {
    let faults = case.record.windows.iter().map(|window| (window.start, window.end + after(window.fault)));
    let silences = case.silences().map(|(from, to)| (from, to + NODE_TIMEOUT));
    let mut covers: Vec<_> =
        faults.chain(silences).filter(|(start, end)| *start < to && from < *end).collect();
    covers.sort();
    let (mut parts, mut at) = (Vec::new(), from);
    for (start, end) in covers.into_iter().chain([(to, to)]) {
        if start > at {
            parts.push((at, start));
        }
        at = at.max(end);
    }
    parts
}

impl<'a> Wait<'a> {
    /// Only the time counts in which a holder is known: while the lock seems free, or is kept for a
    /// lease that was leaked, the rule "waiting" judges.
    ///
    /// The client that has the lock when the wait begins counts twice: its next task may have its
    /// place in the queue already.
    fn of(waiter: &'a Hold, holds: &[&Hold], from: Time, to: Time) -> Wait<'a> {
        let (mut held, mut longest, mut first) = (Duration::ZERO, HashMap::new(), None);
        for hold in holds {
            let Some((grant, until)) = hold.granted.zip(hold.trusted_until()) else { continue };
            if hold.number == waiter.number || grant.at >= to || until <= from {
                continue;
            }
            held += until.min(to).since(grant.at.max(from));
            let of_client = longest.entry(hold.worker()).or_insert(Duration::ZERO);
            *of_client = until.since(grant.at).max(*of_client);
            if grant.at <= from {
                first = Some(hold.worker());
            }
        }
        let twice = first.and_then(|worker| longest.get(&worker));
        let turns = longest.values().chain(twice).map(|longest| LOCAL_TURN + *longest).sum::<Duration>();
        Wait { waiter, from, to, held, allowed: turns + SLACK }
    }
}

/// Panics unless the rule accepts a wait for one turn of another client, and finds one for many.
/// Every run of the checker calls this, as no mutant shows that the rule accepts what it must.
pub fn assert_judges() {
    assert_eq!(violations(HOLDS_OF_A_TURN), 0, "a wait for one turn");
    assert_eq!(violations(20 * HOLDS_OF_A_TURN), 1, "a wait for many turns");
}

/// How many holds of the example are as long as a turn.
const HOLDS_OF_A_TURN: u32 = 5;

/// What the rule finds if a client waits while tasks of another one hold the lock so many times.
fn violations(times: u32) -> usize {
    let (start, mut events) = (Time::now(), Vec::new());
    let time = |at: u32| start + LOCAL_TURN / HOLDS_OF_A_TURN * at;
    let mut note = |at: u32, hold, what| events.push(Event { at: time(at), hold, what });
    let wants = || {
        let (lock, owner, verb) = (LOCKS[0].0.to_owned(), String::new(), Verb::Lock);
        EventKind::Wants { lock, mode: Mode::Exclusive, owner, verb, inside: None, is_renewed: true }
    };
    let granted = |at: u32| EventKind::Granted { token: at.into(), until: time(at) + TTL };
    let (waiter, other) = (1 << 32, 2 << 32);
    note(0, waiter, wants());
    for at in 0..times {
        let hold = other + u64::from(at);
        note(at, hold, wants());
        note(at, hold, granted(at));
        note(at + 1, hold, EventKind::Ends(End::Release));
    }
    note(times, waiter, granted(times));
    let (topology, faults) = (Topology::Standalone, Vec::new());
    let plan = Plan { seconds: 1, seed: 1, topology, faults, linger: 1, sets: 1 };
    let (record, holds) = (Record::of_nothing(start), holds::put_together(0, events));
    let case = Case { plan: &plan, record: &record, holds, start };
    let mut verdict = Verdict::default();
    judge(&case, &mut verdict);
    verdict.violations.len()
}
