//! [`acquire`] and [`try_acquire`]: the entrance of every call that acquires a lock.

use std::future::ready;
use std::pin::pin;
use std::time::Duration;

use tokio::time::timeout;

use super::close::OpenCall;
use super::hold::Hold;
use super::joint_hold::JointHold;
use super::lock_request::{LockRequest, unless_closed};
use super::progress::Progress;
use super::wait_loop::{try_once, wait};
use crate::error::{Error, Operation};
use crate::measure::WakeReason;
use crate::traces::acquiring;

/// One try. `None`: another client holds the lock.
pub(crate) async fn try_acquire(request: &LockRequest) -> Result<Option<Hold>, Error> {
    match find_part(request).await? {
        Some(part) => Ok(Some(part)),
        // Boxed: its state is large, and a call that finds a part does not need it.
        None => Box::pin(try_anew(request)).await,
    }
}

async fn try_anew(request: &LockRequest) -> Result<Option<Hold>, Error> {
    // Dropped after the call: a close must find what it had, here or with the keeper.
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let trying = pin!(async {
        let outcome = try_once(request).await.map(|granted| granted.map(Hold::new));
        let woken = matches!(outcome, Ok(Some(_))).then_some(WakeReason::AtOnce);
        (outcome, woken)
    });
    let traced = pin!(acquiring(request.described(), trying));
    let hold = unless_closed(request, Operation::Acquire, traced).await?;
    Ok(hold.map(|hold| hold.for_nested_calls(request)))
}

/// Waits for the lock, for at most `limit` if there is one, which covers connecting, waiting and
/// retrying. A limit of zero means one try: the first request would never be answered in time.
pub(crate) async fn acquire(request: &LockRequest, limit: Option<Duration>) -> Result<Hold, Error> {
    match find_part(request).await? {
        Some(part) => Ok(part),
        None => acquire_anew(request, limit).await,
    }
}

async fn acquire_anew(request: &LockRequest, limit: Option<Duration>) -> Result<Hold, Error> {
    if let Some(limit @ Duration::ZERO) = limit {
        let granted = Box::pin(try_anew(request)).await?;
        return granted.ok_or_else(|| request.timed_out(limit, true));
    }
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let waiting = pin!(async {
        let mut progress = Progress::default();
        let outcome = match limit {
            None => wait_for_hold(request, &mut progress).await,
            Some(limit) => {
                let outcome = timeout(limit, wait_for_hold(request, &mut progress)).await;
                outcome.unwrap_or_else(|_| Err(progress.out_of_time(request, limit)))
            }
        };
        (outcome, Some(progress.woken))
    });
    let traced = pin!(acquiring(request.described(), waiting));
    let hold = unless_closed(request, Operation::Acquire, traced).await?;
    Ok(hold.for_nested_calls(request))
}

async fn wait_for_hold(request: &LockRequest, progress: &mut Progress) -> Result<Hold, Error> {
    if request.shares() {
        JointHold::wait(request, progress).await.map(Hold::Joint)
    } else {
        wait(request, progress).await.map(Hold::Own)
    }
}

/// A part in a hold of this client, without a request: the short way of most readers and of nested
/// calls.
async fn find_part(request: &LockRequest) -> Result<Option<Hold>, Error> {
    if !request.shares() {
        return Hold::enter(request);
    }
    let Some(part) = JointHold::read(request).await else { return Ok(None) };
    let call = pin!(ready((Ok(Hold::Joint(part)), Some(WakeReason::Local))));
    acquiring(request.described(), call).await.map(Some)
}
