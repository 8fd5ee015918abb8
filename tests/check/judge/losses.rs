//! A holder knows in time that its lease is over, and is told so only if it is.

use std::collections::HashMap;
use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict};
use crate::history::Time;
use crate::observer::Observation;
use crate::plan::{Fault, NODE_TIMEOUT, TTL};
use crate::run::STALL;

/// How often a holder looks who does not wait to be told.
const GLANCE: Duration = Duration::from_millis(50);

/// A lease counts from before the request left, and is over before the server's ttl is: less the drift.
const LEASE: Duration = Duration::from_millis(TTL.as_millis() as u64 * 99 / 100 - 2);

/// A renewal is answered within this: after one that was not, after the pause that follows, on a new connection.
const RENEWING: Duration = NODE_TIMEOUT.saturating_add(Duration::from_millis(400));

/// Each look at a deadline reads two clocks, and says a little more or less.
const JITTER: Duration = Duration::from_millis(5);

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for hold in &case.holds {
        let Some(grant) = hold.granted else { continue };
        let reaches = hold.trusts.iter().copied().chain([(grant.at, grant.until)]);
        for (at, until) in reaches {
            if until > at + LEASE {
                let text =
                    format!("{}: at {:.3} until {:.3}", case.say(hold), case.when(at), case.when(until));
                verdict.violates("deadline", text);
            }
        }
        if hold.trusts.windows(2).any(|pair| goes_back(case, pair[0], pair[1])) {
            verdict.violates("deadline", format!("{} went back", case.say(hold)));
        }
        if let Some((at, until)) = hold.trusted_too_long {
            let text =
                format!("{}: at {:.3}, over since {:.3}", case.say(hold), case.when(at), case.when(until));
            verdict.violates("deadline", text);
        }
        if let Some((at, until)) = hold.lost {
            verdict.told_losses += 1;
            told_in_time(case, hold, at, until, verdict);
            is_true(case, hold, at, until, verdict);
        }
    }
}

/// One clock was read after the other to say when it is over: whoever was not let run in between says too early a time.
fn goes_back(case: &Case<'_>, before: (Time, Time), after: (Time, Time)) -> bool {
    let stalled = !case.stalled(before.0, after.0).is_zero();
    after.1 + STALL < before.1 && !stalled
}

fn told_in_time(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    // One that is renewed may have been since it was last looked at, and then it was looked at again.
    let looked = hold.trusts.last().map_or(until, |(looked, _)| *looked + GLANCE);
    let mut due = until.max(looked);
    let stood_still = case.record.windows.iter().filter(|window| {
        window.place == Some(hold.place)
            && matches!(window.fault, Fault::WorkerStopped | Fault::WorkerBlocked)
    });
    // From when it ran again. Whoever is told to do nothing begins with that a little later.
    for window in stood_still {
        if window.start <= due + PROMPT && window.end > due {
            due = window.end;
        }
    }
    if at > due + PROMPT + case.stalled(due, at) {
        let text = format!("{} was told at {:.3}", case.say(hold), case.when(at));
        verdict.violates("told in time", text);
    }
}

/// The end of what no server has lost is told at its deadline; and what is renewed outlasts its ttl, unless something was
/// done for so long that no renewal could be answered.
fn is_true(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    if case.lost_by(&hold.lock, hold.held_since(), at).is_some() || !outlasts_nodes(case, hold, at) {
        return;
    }
    if at + JITTER < until {
        let text = format!("{} was told at {:.3}, before its deadline", case.say(hold), case.when(at));
        return verdict.violates("false loss", text);
    }
    // It may have been renewed since it was last looked at: not later than this.
    let renewed = at - LEASE;
    let calm = longest_calm(case, hold, renewed + TTL / 3, until);
    if hold.renewed && calm >= RENEWING {
        let text = format!(
            "{} was told at {:.3}, though nothing kept it from being renewed for {calm:?}",
            case.say(hold),
            case.when(at)
        );
        verdict.violates("false loss", text);
    }
}

/// Of a quorum, what all nodes have outlasts whatever is done to a minority of them; what only a majority has need not. A
/// node that was away may grant a lock to those who queue there before its holder gets it again.
fn outlasts_nodes(case: &Case<'_>, hold: &Hold, at: Time) -> bool {
    if case.plan.topology.nodes() == 1 {
        return true;
    }
    let of_servers = case.windows_during(hold.held_since(), at).filter(|window| window.place.is_none());
    let Some(last) = of_servers.map(|window| window.start).max() else { return true };
    let mut latest: HashMap<u16, &Observation> = HashMap::new();
    let looks = case.record.observations.iter().filter(|look| look.lock == hold.lock);
    for look in looks.filter(|look| look.to < last && last.since(look.to) < TTL / 3) {
        let seen = latest.entry(look.port).or_insert(look);
        if seen.to < look.to {
            *seen = look;
        }
    }
    latest.values().filter(|look| hold.is_in(look)).count() == case.plan.topology.nodes()
}

/// The longest time in which nothing was done that may keep a hold from being renewed.
fn longest_calm(case: &Case<'_>, hold: &Hold, from: Time, to: Time) -> Duration {
    let faults = case.delays(hold, from, to).map(|window| (window.start, window.end));
    let mut hit: Vec<(Time, Time)> = faults.chain(case.record.stalls.iter().copied()).collect();
    hit.sort();
    let (mut longest, mut at) = (Duration::ZERO, from);
    for (start, end) in hit {
        longest = longest.max(start.min(to).since(at));
        at = at.max(end);
    }
    longest.max(to.since(at))
}
