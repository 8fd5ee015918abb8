//! A holder knows in time that its lease is over, and is told so only if it is.

use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::arena::STALL;
use crate::history::{Mode, NOT_HELD, Time};
use crate::plan::{Fault, SLACK, TTL};

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
        }
        found_at_release(case, hold, verdict);
    }
}

/// One clock was read after the other to say when it is over: whoever was not let run in between says too early a time.
fn goes_back(case: &Case<'_>, before: (Time, Time), after: (Time, Time)) -> bool {
    let stalled = case.record.stalls.iter().any(|(from, to)| *from <= after.0 && before.0 <= *to);
    after.1 + STALL < before.1 && !stalled
}

fn told_in_time(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    let stood_still = case.windows_during(until, at).any(|window| {
        window.place == Some(hold.place)
            && matches!(window.fault, Fault::WorkerStopped | Fault::WorkerBlocked)
    });
    // It may have been renewed since it was last looked at.
    if at > until + TTL + SLACK && !stood_still {
        let text = format!("{} was told at {:.3}", case.say(hold), case.when(at));
        verdict.violates("told in time", text);
    }
}

/// Who gives it back before its deadline finds it: nobody else had ended it.
fn found_at_release(case: &Case<'_>, hold: &Hold, verdict: &mut Verdict) {
    let (Some(grant), Some((at, Err(failure)))) = (hold.granted, &hold.released) else { return };
    // Where nodes come and go, a majority of others may be left.
    if failure != NOT_HELD || case.plan.topology.nodes() > 1 {
        return;
    }
    let until = hold.trusts.last().map_or(grant.until, |(_, until)| *until);
    if *at < until && case.lost_by(grant.at, *at).is_none() {
        let text = format!("{} was not found at {:.3}", case.say(hold), case.when(*at));
        verdict.violates("release", text);
    }
}

/// Said to be lost before its deadline, and found afterwards, by one who looks past everybody.
fn is_true(case: &Case<'_>, hold: &Hold, at: Time, until: Time, verdict: &mut Verdict) {
    if hold.mode != Mode::Exclusive || case.plan.topology.nodes() > 1 || at >= until {
        return;
    }
    let given_up = hold.ends.map_or(at, |(ends, _)| ends);
    let token = hold.granted.map(|grant| grant.token);
    let still = case.record.observations.iter().find(|look| {
        look.lock == hold.lock && look.from > at && look.to < given_up && look.held_with == token
    });
    // What was lost with a master may be found again at its replica: that is no error of the client.
    if let Some(look) = still
        && case.lost_by(hold.wants, look.to).is_none()
    {
        let text = format!("{} was told at {:.3}", case.say(hold), case.when(at));
        verdict.violates("false loss", text);
    }
}
