//! Rules "fenced resource" and "unfenced resource": what the resources accepted and lost.

use std::collections::HashMap;

use super::{Case, Hold, Verdict};
use crate::history::{Mode, Time};

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for (lock, number) in &case.record.numbers {
        let holds: Vec<&Hold> = case.holds.iter().filter(|hold| hold.lock == *lock).collect();
        fenced(case, &holds, verdict);
        unfenced(&holds, lock, *number, verdict);
    }
}

/// No write is accepted after one with a larger token, and no write of a trusted writer is refused.
fn fenced(case: &Case<'_>, holds: &[&Hold], verdict: &mut Verdict) {
    let mut writes: Vec<(Time, Time, bool, u64, &Hold)> = Vec::new();
    for hold in holds {
        let Some(grant) = hold.granted else { continue };
        writes.extend(
            hold.writes.iter().map(|(since, at, accepted)| (*since, *at, *accepted, grant.token, *hold)),
        );
    }
    // Only late writes are counted as rejected. Behind Sentinel, in a cluster and in a quorum,
    // readers have tokens of their own, so one reader's write may be refused after another's.
    let is_late = |hold: &Hold, at: Time| hold.trusted_until().is_some_and(|until| at >= until);
    let refused = writes.iter().filter(|(_, at, accepted, _, hold)| !accepted && is_late(hold, *at));
    verdict.rejected_writes += refused.count();
    writes.sort_by_key(|(since, ..)| *since);
    let mut done: Vec<_> = writes.iter().filter(|(_, _, accepted, ..)| *accepted).collect();
    done.sort_by_key(|(_, at, ..)| *at);
    let mut done = done.into_iter().peekable();
    let mut largest = 0;
    for (since, at, accepted, token, hold) in &writes {
        while let Some((.., written, _)) = done.next_if(|(_, at, ..)| at < since) {
            largest = largest.max(*written);
        }
        if *accepted && *token < largest {
            let text =
                format!("{} wrote at {:.3} after the token {largest}", case.describe(hold), case.when(*at));
            verdict.violates("fenced resource", text);
        }
        // A trusted writer has the largest token.
        let trusted = hold.trusted_until().is_some_and(|until| *at < until);
        let alone = hold.mode == Mode::Exclusive
            && trusted
            && case.lost_by(&hold.lock, hold.held_since(), *at).is_none();
        if !accepted && alone {
            let text = format!("a write of {} was refused at {:.3}", case.describe(hold), case.when(*at));
            verdict.violates("fenced resource", text);
        }
    }
}

/// Additions are lost only through holders that continued after the end or the loss of their lease,
/// or died within an addition.
fn unfenced(holds: &[&Hold], lock: &str, number: u64, verdict: &mut Verdict) {
    let lost_since: HashMap<u64, Time> =
        verdict.lost_windows.iter().map(|window| (window.hold, window.from)).collect();
    let mut additions: Vec<(Time, Time, bool)> = Vec::new();
    for hold in holds {
        let over = hold.trusted_until().min(lost_since.get(&hold.number).copied().or(hold.trusted_until()));
        let overruns = |at: Time| over.is_none_or(|over| at > over);
        additions.extend(hold.additions.iter().map(|(since, at)| (*since, *at, overruns(*at))));
    }
    let lost = (additions.len() as u64).saturating_sub(number);
    verdict.lost_additions += lost;
    // A late addition overwrites the additions of others during it, or is overwritten by one of
    // them.
    let during =
        |from: Time, to: Time| additions.iter().filter(move |(since, at, _)| *since <= to && from <= *at);
    let mut excused: u64 = 0;
    for (since, at, _) in additions.iter().filter(|(.., overruns)| *overruns) {
        excused += during(*since, *at).count() as u64;
    }
    if lost > excused {
        let text = format!(
            "{lost} of {} additions to {lock} are lost, at most {excused} of them by holders without a lease",
            additions.len()
        );
        verdict.violates("unfenced resource", text);
    }
}
