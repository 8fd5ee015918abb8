//! One use of several locks by one task, in one call.

use std::time::Duration;

use redlatch::{AllGuard, Error, Member, Owner};
use tokio::time::{sleep, timeout};

use crate::history::{End, EventKind, FailureReason, Mode, Verb};
use crate::support::{Kind, Random};
use crate::worker::Worker;
use crate::workload::{Hold, LOCKS, Request, failed, millis, unreleased};

/// The most names in a call.
const MOST: u64 = 8;

/// One of the locks: the number of its hold, and what is requested.
struct Wanted {
    number: u64,
    request: Request,
    mode: Mode,
}

/// Acquires two to eight locks in one call, works under each, and ends all together.
pub async fn use_set(worker: &Worker, random: &mut Random) {
    let (mut wanted, mut members) = (Vec::new(), Vec::new());
    for (name, kind) in chosen(random) {
        let number = worker.next_hold();
        let request = Request { name, inside: None, is_renewed: true };
        let (member, mode, owner) = member(worker, random, (name, kind), number);
        worker.recorder.note(number, request.wants(mode, owner, Verb::All));
        wanted.push(Wanted { number, request, mode });
        members.push(member);
    }
    let all = worker.locks.all(members).unwrap();
    let limit = millis(random, 5, 3_000);
    let outcome = match random.below(10) {
        0 => all.try_lock().await.transpose(),
        1..=3 => Some(all.lock_timeout(limit).await),
        // The future is dropped at any await: while it waits, with some of the locks held.
        4..=6 => timeout(limit, all.lock()).await.ok(),
        _ => Some(all.lock().await),
    };
    let not_granted = |why: FailureReason| {
        wanted.iter().for_each(|lock| worker.recorder.note(lock.number, EventKind::NotGranted(why.clone())));
    };
    match outcome {
        Some(Ok(guard)) => return hold(worker, random, &wanted, guard).await,
        None => not_granted(FailureReason::Cancelled), // or one of them was busy
        Some(Err(Error::TimedOut { .. })) => not_granted(FailureReason::TimedOut),
        Some(Err(error)) => not_granted(failed(&error)),
    }
    sleep(millis(random, 0, 10)).await;
}

/// Two to eight different locks.
fn chosen(random: &mut Random) -> Vec<(&'static str, Kind)> {
    let count = 2 + random.below(MOST - 1);
    let mut left = LOCKS.to_vec();
    let mut take = |_| left.swap_remove(usize::try_from(random.below(left.len() as u64)).unwrap());
    (0..count).map(&mut take).collect()
}

/// A lock as a member, its mode, and the owner that the history has.
fn member(
    worker: &Worker,
    random: &mut Random,
    (name, kind): (&str, Kind),
    number: u64,
) -> (Member, Mode, String) {
    let (locks, owner) = (&worker.locks, Owner::new());
    match kind {
        Kind::Reentrant => {
            let lock = locks.reentrant(name, &owner).unwrap();
            (lock.into(), Mode::Exclusive, owner.to_string())
        }
        Kind::Mutex => (locks.mutex(name).unwrap().into(), Mode::Exclusive, number.to_string()),
        Kind::Read | Kind::Write => {
            let lock = locks.rwlock(name).unwrap();
            if random.below(2) == 0 {
                (Member::Read(lock), Mode::Shared, number.to_string())
            } else {
                (Member::Write(lock), Mode::Exclusive, number.to_string())
            }
        }
    }
}

/// Works under one lock after the other, and ends all holds.
async fn hold(worker: &Worker, random: &mut Random, wanted: &[Wanted], guard: AllGuard) {
    let granted = |lock: &Wanted| {
        let lease = guard.leases().get(lock.request.name).expect("each has a lease");
        Hold::granted(worker, lock.number, lock.request, lock.mode, lease)
    };
    let mut holds: Vec<Hold<'_>> = wanted.iter().map(granted).collect();
    for place in 0..holds.len() {
        // A holder of many checks all of its leases again and again.
        for hold in &mut holds {
            hold.check_lease();
        }
        let stay = if random.below(20) == 0 { millis(random, 0, 20) } else { Duration::ZERO };
        if !holds[place].work(random, stay).await {
            break;
        }
    }
    let end = if random.below(3) == 0 { End::Drop } else { End::Release };
    holds.iter().for_each(|hold| hold.note(EventKind::Ends(end)));
    if end == End::Drop {
        return drop(guard);
    }
    match guard.release().await {
        Ok(()) => holds.iter().for_each(|hold| hold.note(EventKind::Released(Ok(())))),
        // It names one of them; of the others nothing is known.
        Err(error) => {
            let of = error.context().and_then(|context| context.lock()).map(|name| name.as_str().to_owned());
            let failed = wanted.iter().zip(&holds).find(|(lock, _)| of.as_deref() == Some(lock.request.name));
            if let Some((_, hold)) = failed {
                hold.note(EventKind::Released(Err(unreleased(&error))));
            }
        }
    }
}
