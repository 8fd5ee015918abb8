//! Rules "deadline", "late report" and "false loss": the end of a lease is reported in time, and
//! only if the lease has ended.

use std::collections::HashMap;
use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict};
use crate::history::Time;
use crate::observer::Observation;
use crate::plan::{Fault, NODE_TIMEOUT, TTL};
use crate::run::STALL;

/// How often a holder of a renewed lease checks it.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The longest time of validity. A lease counts from before the request left, and expires before
/// the TTL of the server does, by the drift.
const LEASE: Duration = Duration::from_millis(TTL.as_millis() as u64 * 99 / 100 - 2);

/// The time within which a lease is renewed, even if the first request gets no reply and is
/// repeated after a pause, on a new connection.
const RENEWING: Duration = NODE_TIMEOUT.saturating_add(Duration::from_millis(400));

/// Each `valid_until` reads two clocks, so it varies a little.
const JITTER: Duration = Duration::from_millis(5);

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for hold in &case.holds {
        let Some(grant) = hold.granted else { continue };
        let reaches = hold.trusts.iter().copied().chain([(grant.at, grant.until)]);
        for (at, until) in reaches {
            if until > at + LEASE {
                let text = format!(
                    "{}: at {:.3} valid until {:.3}",
                    case.describe(hold),
                    case.when(at),
                    case.when(until)
                );
                verdict.violates("deadline", text);
            }
        }
        if hold.trusts.windows(2).any(|pair| goes_back(case, pair[0], pair[1])) {
            verdict.violates("deadline", format!("the deadline of {} moved back", case.describe(hold)));
        }
        if let Some((at, until)) = hold.trusted_too_long {
            let text = format!(
                "{}: valid at {:.3}, after its deadline {:.3}",
                case.describe(hold),
                case.when(at),
                case.when(until)
            );
            verdict.violates("deadline", text);
        }
        if let Some((at, until)) = hold.lost {
            verdict.reported_losses += 1;
            late_report(case, hold, at, until, verdict);
            false_loss(case, hold, at, until, verdict);
        }
    }
}

/// Whether the deadline moved back. `Time::of` reads one clock after the other, and returns too
/// early a time if its thread was interrupted in between: such differences, and stalls, do not
/// count.
fn goes_back(case: &Case<'_>, before: (Time, Time), after: (Time, Time)) -> bool {
    let stalled = !case.stalled(before.0, after.0).is_zero();
    after.1 + STALL < before.1 && !stalled
}

fn late_report(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    // If a renewal after the last check had moved the deadline past the next check, that check
    // would have been recorded.
    let checked = hold.trusts.last().map_or(until, |(checked, _)| *checked + CHECK_INTERVAL);
    let mut due = until.max(checked);
    let paused = case.record.windows.iter().filter(|window| {
        window.place == Some(hold.place)
            && matches!(window.fault, Fault::WorkerStopped | Fault::WorkerBlocked)
    });
    // A report is due once the worker runs again. A pause takes effect a little after its command,
    // so pauses that begin shortly after the report was due count as well.
    for window in paused {
        if window.start <= due + PROMPT && window.end > due {
            due = window.end;
        }
    }
    if at > due + PROMPT + case.stalled(due, at) {
        let text = format!(
            "the loss of {} was reported at {:.3}, due at {:.3}",
            case.describe(hold),
            case.when(at),
            case.when(due)
        );
        verdict.violates("late report", text);
    }
}

/// If no server has lost the hold, its end is reported at the deadline and not before. And a
/// renewed lease does not end, unless faults left less than `RENEWING` in one piece for a renewal.
fn false_loss(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    if case.lost_by(&hold.lock, hold.held_since(), at).is_some() || !outlasts_nodes(case, hold, at) {
        return;
    }
    if at + JITTER < until {
        let text = format!(
            "the loss of {} was reported at {:.3}, before its deadline",
            case.describe(hold),
            case.when(at)
        );
        return verdict.violates("false loss", text);
    }
    // The latest time of the last renewal: the lease may have been renewed after the last check.
    let renewed = at - LEASE;
    let calm = longest_calm(case, hold, renewed + TTL / 3, until);
    if hold.is_renewed && calm >= RENEWING {
        let text = format!(
            "the loss of {} was reported at {:.3}, although no fault prevented a renewal for {calm:?}",
            case.describe(hold),
            case.when(at)
        );
        verdict.violates("false loss", text);
    }
}

/// Whether the lease must outlast the faults. In a quorum, a lease on all nodes outlasts every
/// fault of a minority. A lease on a mere majority need not: a node that was away may grant the
/// lock to its own waiters before the holder repairs the lease there.
fn outlasts_nodes(case: &Case<'_>, hold: &Hold, at: Time) -> bool {
    if case.plan.topology.nodes() == 1 {
        return true;
    }
    let of_servers = case.windows_during(hold.held_since(), at).filter(|window| window.place.is_none());
    let Some(last) = of_servers.map(|window| window.start).max() else { return true };
    let mut latest: HashMap<u16, &Observation> = HashMap::new();
    let observations = case.record.observations.iter().filter(|observation| observation.lock == hold.lock);
    for observation in
        observations.filter(|observation| observation.to < last && last.since(observation.to) < TTL / 3)
    {
        let seen = latest.entry(observation.port).or_insert(observation);
        if seen.to < observation.to {
            *seen = observation;
        }
    }
    latest.values().filter(|observation| hold.is_in(observation)).count() == case.plan.topology.nodes()
}

/// The longest time without a fault that may delay a renewal.
fn longest_calm(case: &Case<'_>, hold: &Hold, from: Time, to: Time) -> Duration {
    let faults = case.delays(hold, from, to).map(|window| (window.start, window.end));
    let mut hit: Vec<(Time, Time)> = faults.chain(case.silences()).collect();
    hit.sort();
    let (mut longest, mut at) = (Duration::ZERO, from);
    for (start, end) in hit {
        longest = longest.max(start.min(to).since(at));
        at = at.max(end);
    }
    longest.max(to.since(at))
}
