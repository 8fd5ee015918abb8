//! A holder knows in time that its lease is over, and is told so only if it is.

use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict};
use crate::arena::STALL;
use crate::history::{Mode, Time};
use crate::plan::{Fault, NODE_TIMEOUT, TTL};

/// How often a holder looks who does not wait to be told.
const GLANCE: Duration = Duration::from_millis(50);

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for hold in &case.holds {
        let Some(grant) = hold.granted else { continue };
        // Counted from before the request left, it is over before the server's ttl is, less the drift.
        let longest = TTL.mul_f64(0.99) - Duration::from_millis(2);
        let reaches = hold.trusts.iter().copied().chain([(grant.at, grant.until)]);
        for (at, until) in reaches {
            if until > at + longest {
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
            is_renewed(case, hold, at, until, verdict);
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

/// What is renewed outlasts its ttl, unless something was done to those who renew it, or its server has lost it.
fn is_renewed(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    // Until then it was renewed, or granted. A request that left before may have been hit as well.
    let renewed = until - TTL - NODE_TIMEOUT;
    let lost = case.lost_by(hold.held_since(), at).is_some();
    if hold.renewed && !lost && !case.is_hit(hold, renewed, at) && case.stalled(renewed, at).is_zero() {
        let text =
            format!("{} was told at {:.3}, without a fault since its renewal", case.say(hold), case.when(at));
        verdict.violates("false loss", text);
    }
}

/// Said to be lost before its deadline, and found afterwards, by one who looks past everybody.
fn is_true(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    if hold.mode != Mode::Exclusive || case.plan.topology.nodes() > 1 || at >= until {
        return;
    }
    let given_up = hold.ends.map_or(at, |(ends, _)| ends);
    let still = case
        .record
        .observations
        .iter()
        .find(|look| look.lock == hold.lock && look.from > at && look.to < given_up && hold.is_in(look));
    // What was lost with a master may be found again at its replica: that is no error of the client.
    if let Some(look) = still
        && case.lost_by(hold.wants, look.to).is_none()
    {
        let text = format!("{} was told at {:.3}", case.say(hold), case.when(at));
        verdict.violates("false loss", text);
    }
}
