//! Rule "turn": once its turn is over, a client does not keep a lock that another client waits for.

use super::{Case, Hold, PROMPT, Verdict};
use crate::clock::STEP;
use crate::history::Verb;
use crate::plan::{LOCAL_TURN, TTL};
use crate::support::Kind;
use crate::workload::LOCKS;

/// Mutexes, and the writers of a read-write lock among themselves: owners are never passed on. Each
/// node of a quorum has a queue of its own, and one that was asked late may decide.
pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    if case.plan.topology.nodes() > 1 {
        return;
    }
    for (lock, holds) in case.by_lock() {
        if LOCKS.contains(&(lock, Kind::Reentrant)) {
            continue;
        }
        let holds: Vec<&Hold> = holds.into_iter().filter(|hold| hold.is_outer_exclusive()).collect();
        let mut turn_began = None; // with this hold of the client
        for pair in holds.windows(2) {
            let [hold, next] = pair else { continue };
            // One of several locks is held long before the whole set is. Meanwhile a task of the
            // same client has a place in the queue, before that of others.
            let is_kept = next.worker() == hold.worker() && hold.verb != Verb::All;
            let first = turn_began.unwrap_or(*hold);
            turn_began = is_kept.then_some(first);
            if is_kept
                && is_over(first, hold)
                && let Some(waiter) = waiter(case, lock, first, next)
            {
                let text = format!(
                    "after {}, whose client's turn began at {:.3}, the same client had {}, before {}",
                    case.describe(hold),
                    first.granted.map_or(0.0, |grant| case.when(grant.at)),
                    case.describe(next),
                    case.describe(waiter),
                );
                verdict.violates("turn", text);
            }
        }
    }
}

/// Whether the turn was over when this hold ended. Both times are on the safe side: the server had
/// granted the first hold before its worker noted that, and the release began after it was noted.
fn is_over(first: &Hold, hold: &Hold) -> bool {
    let granted = first.granted.map(|grant| grant.at);
    hold.ends.zip(granted).is_some_and(|((ended, _), granted)| ended > granted + LOCAL_TURN)
}

/// A request of another client that had its place in the queue before the turn began, and was still
/// waiting when the next hold was granted.
fn waiter<'a>(case: &'a Case<'_>, lock: &str, first: &Hold, next: &Hold) -> Option<&'a Hold> {
    let (from, to) = (first.granted?.at, next.granted?.at);
    let hits = |hold: &Hold| case.is_hit(hold, from - TTL, to);
    // A place in a queue is a time of the server's clock, so a step moves it to the front or back.
    let is_stepped = case.windows_during(from - 2 * STEP, to).any(|window| window.fault.sets_clock());
    if hits(first) || is_stepped || case.were_silent(from - 2 * PROMPT, to) {
        return None;
    }
    let holds = || case.holds.iter().filter(|hold| hold.lock == lock && hold.is_outer_exclusive());
    // Another task of that client may have had its place, and left the queue or got the lock.
    let changed_place = |worker| {
        let mut ended = holds().filter(|hold| hold.worker() == worker).filter_map(Hold::asked_until);
        ended.any(|ended| from <= ended + PROMPT && ended <= to)
    };
    holds().find(|hold| {
        let waits = hold.wants + PROMPT < from && hold.asked_until().is_some_and(|ended| ended > to);
        let is_another = hold.may_queue() && hold.worker() != first.worker();
        waits && is_another && !hits(hold) && !changed_place(hold.worker())
    })
}
