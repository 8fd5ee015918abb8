//! Rule "overtaking": a waiter is not overtaken again and again, however busy the lock is.

use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::clock::STEP;
use crate::history::Time;
use crate::plan::POLL_CAP;

/// In how many turns of clients later requests may be granted before an earlier one: twice the
/// number of tasks. The tasks of a client queue behind one of them and follow it, readers are
/// admitted together, and faults lose places in queues.
const MAX_OVERTAKEN: usize = 64;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    for (lock, granted) in case.by_lock() {
        let granted: Vec<&Hold> = granted.into_iter().filter(|hold| hold.inside.is_none()).collect();
        let waiters =
            case.holds.iter().filter(|hold| hold.lock == lock && hold.inside.is_none() && hold.may_queue());
        let counted = waiters.map(|waiter| (overtaken(case, waiter, &granted), waiter));
        let Some((times, waiter)) = counted.max_by_key(|(times, _)| *times) else { continue };
        if times > MAX_OVERTAKEN {
            let text = format!("{} was overtaken {times} times", case.describe(waiter));
            verdict.violates("overtaking", text);
        }
    }
}

/// In how many turns later requests were granted earlier, not counting those during a fault of the
/// waiter's worker, nor while a step of the clock sets its place back. Tasks that pass a lock on
/// inside their client have one turn together.
fn overtaken(case: &Case<'_>, waiter: &Hold, granted: &[&Hold]) -> usize {
    let end = waiter.asked_until().unwrap_or(waiter.worker_ended);
    let hit: Vec<(Time, Time)> = case
        .windows_during(waiter.wants - STEP, end) // its client may have queued before
        .filter(|window| window.place == Some(waiter.place) || window.fault.sets_clock())
        .map(|window| {
            let step = if window.fault.sets_clock() { STEP } else { Duration::ZERO };
            (window.start, window.end + step + POLL_CAP)
        })
        .collect();
    let later = granted.iter().filter(|hold| hold.wants > waiter.wants);
    let grants = later.filter_map(|hold| Some((hold.worker(), hold.granted?.at))).filter(|(_, at)| *at < end);
    let counted = grants.filter(|(_, at)| !hit.iter().any(|(from, to)| from <= at && at <= to));
    let mut workers: Vec<u64> = counted.map(|(worker, _)| worker).collect();
    workers.dedup();
    workers.len()
}
