//! What the locks protect: the one that compares tokens, and the one that compares nothing.

use super::{Case, Hold, Verdict};
use crate::history::{Mode, Time};

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for (lock, number) in &case.record.numbers {
        let holds: Vec<&Hold> = case.holds.iter().filter(|hold| hold.lock == *lock).collect();
        fenced(case, &holds, verdict);
        unfenced(&holds, lock, *number, verdict);
    }
}

/// No write was accepted after one with a larger token had been.
fn fenced(case: &Case<'_>, holds: &[&Hold], verdict: &mut Verdict) {
    let mut writes: Vec<(Time, Time, bool, u64, &Hold)> = Vec::new();
    for hold in holds {
        let Some(grant) = hold.granted else { continue };
        writes.extend(
            hold.writes.iter().map(|(since, at, accepted)| (*since, *at, *accepted, grant.token, *hold)),
        );
    }
    verdict.rejected_writes += writes.iter().filter(|(_, _, accepted, ..)| !accepted).count();
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
            let text = format!("{} wrote at {:.3} after {largest}", case.say(hold), case.when(*at));
            verdict.violates("fenced resource", text);
        }
        // Whoever is alone has the largest token.
        let trusted = hold.trusted_until().is_some_and(|until| *at < until);
        let alone = hold.mode == Mode::Exclusive && trusted && case.lost_by(hold.held_since(), *at).is_none();
        if !accepted && alone {
            let text = format!("{} was refused at {:.3}", case.say(hold), case.when(*at));
            verdict.violates("fenced resource", text);
        }
    }
}

/// Additions are lost only by those who went on after their lease was over, or died in the middle.
fn unfenced(holds: &[&Hold], lock: &str, number: u64, verdict: &mut Verdict) {
    let mut added: u64 = 0;
    let mut overrun: u64 = 0;
    for hold in holds {
        for (_, at) in &hold.additions {
            added += 1;
            overrun += u64::from(hold.trusted_until().is_none_or(|until| *at > until));
        }
    }
    let lost = added.saturating_sub(number);
    verdict.lost_additions += lost;
    // One who goes on too long may overwrite several.
    if lost > 0 && overrun == 0 && verdict.lost_windows.is_empty() {
        let text = format!("{lost} of {added} additions to {lock} are lost, and nobody went on too long");
        verdict.violates("unfenced resource", text);
    }
}
