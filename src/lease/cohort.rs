//! [`Cohort`]: a hold that the tasks of this client pass to each other for a short time, before
//! another client has its turn: *lock cohorting* (Dice, Marathe, Shavit, PPoPP 2012).

use std::any::Any;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::attempt_guard::AttemptGuard;
use super::client::Client;
use super::keeper::OpenCall;
use super::local_queue::LocalFront;
use super::lock_request::LockRequest;
use super::turn::Turn;
use crate::clock::Moment;
use crate::guarded::Guarded;

/// One hold on the server, from its grant until it is released there.
pub(super) struct Cohort {
    /// When the next client has its turn.
    until: Moment,
    /// A task that comes late must find the hold valid for at least so long.
    least: Duration,
    state: Guarded<CohortState>,
    /// It has been passed on.
    has_passed: AtomicBool,
    /// It was ended before its time: it may have been revoked.
    is_ended: AtomicBool,
    timer: OnceLock<AbortHandle>,
}

/// ```text
///           leave, pass              end
///  ┌──────┐ ──────────► ┌────────┐ ─────────► released on the server
///  │ Held │             │ Passed │
///  └──┬───┘ ◄────────── └────────┘
///     │       receive
///     │ end: the next task asks the server, and is queued there
///     ▼
///  ┌──────┐
///  │ Over │  the holder releases it on the server
///  └──────┘
/// ```
enum CohortState {
    /// A task holds the lock, and is at the front of the local queue: no task asks the server.
    Held(LocalFront),
    /// The task that held it has left it to the one that comes to the front next.
    Passed(Box<PassedHold>),
    /// It is not passed on any more.
    Over,
}

/// A hold between two tasks. Dropped, it is released on the server in the background.
pub(super) struct PassedHold {
    pub(super) guard: AttemptGuard,
    /// The deadline of the lease before.
    pub(super) until: Moment,
    /// Dropped after the guard: until then a close must not find that everything is released.
    pub(super) call: OpenCall,
}

impl Cohort {
    /// Begins with a grant by the server. If the hold may not be passed on, the next task comes to
    /// the front at once, and only its length is observed.
    pub(super) fn begin(
        client: &Client,
        (until, least): (Moment, Duration),
        front: LocalFront,
        may_pass: bool,
    ) -> Arc<Cohort> {
        let cohort = Arc::new(Cohort {
            until,
            least,
            state: Guarded::new(CohortState::Over),
            has_passed: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            timer: OnceLock::new(),
        });
        let turn: Arc<dyn Turn> = Arc::<Cohort>::clone(&cohort);
        // Another thread may find the turn and end it before it holds anything: it waits here.
        let mut state = cohort.state.lock();
        front.note_turn(may_pass.then(|| Arc::downgrade(&turn)));
        if may_pass {
            *state = CohortState::Held(front);
        }
        drop(state);
        if may_pass {
            let ending = EndOfTurn(Arc::downgrade(&cohort));
            let timer = client.nodes.runtime.spawn(async move {
                sleep(until.since(Moment::now())).await;
                drop(ending);
            });
            cohort.timer.get_or_init(|| timer.abort_handle());
        }
        cohort
    }

    /// Whether another task may still have its turn.
    pub(super) fn has_time(&self) -> bool {
        !self.is_ended.load(Ordering::Relaxed) && Moment::now() < self.until
    }

    /// The holder ends its hold. Returns its place at the front, unless that was given on: then the
    /// hold is to be released on the server.
    pub(super) fn leave(&self) -> Option<LocalFront> {
        match mem::replace(&mut *self.state.lock(), CohortState::Over) {
            CohortState::Held(front) => {
                if !self.has_time() && !self.has_passed.load(Ordering::Relaxed) {
                    front.note_slow(true);
                }
                Some(front)
            }
            CohortState::Passed(_) | CohortState::Over => None,
        }
    }

    /// Leaves the hold to the task that comes to the front next. Returns it if there is none, or no
    /// time: the timer may have ended while no task held it. Or the client closes meanwhile.
    pub(super) fn pass(self: &Arc<Cohort>, hold: PassedHold, front: LocalFront) -> Option<PassedHold> {
        let keeper = Arc::clone(hold.call.keeper());
        *self.state.lock() = CohortState::Passed(Box::new(hold));
        self.has_passed.store(true, Ordering::Relaxed);
        // In this order: a close ends all turns after it has begun, and so finds what is passed.
        if front.pass(Arc::<Cohort>::clone(self)) && self.has_time() && !keeper.closing.has_begun() {
            return None;
        }
        let mut state = self.state.lock();
        match mem::replace(&mut *state, CohortState::Over) {
            CohortState::Passed(hold) => Some(*hold),
            received => {
                *state = received;
                None
            }
        }
    }

    /// The hold that was left to the task at the front.
    pub(super) fn left_to(front: &LocalFront) -> Option<Arc<Cohort>> {
        let turn: Arc<dyn Any + Send + Sync> = front.take_passed()?;
        turn.downcast().ok()
    }

    /// Gives the hold to a task that has come to the front; returns the front if the hold was
    /// released meanwhile, or is released now, since the task asks for something else, or comes too
    /// late.
    pub(super) fn receive(&self, request: &LockRequest, front: LocalFront) -> Result<PassedHold, LocalFront> {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, CohortState::Over) {
            // If the turn was ended between the steps of `pass`, the hold may have been revoked,
            // and `end` had nothing to release.
            CohortState::Passed(hold)
                if !request.is_for(&hold.guard.attempt)
                    || hold.until.since(Moment::now()) < self.least
                    || self.is_ended.load(Ordering::Relaxed) =>
            {
                drop(state);
                drop(hold);
                Err(front)
            }
            CohortState::Passed(hold) => {
                if self.has_time() {
                    *state = CohortState::Held(front);
                } else {
                    drop(state);
                    drop(front); // the next task asks the server
                }
                Ok(*hold)
            }
            CohortState::Held(_) | CohortState::Over => Err(front),
        }
    }
}

impl Turn for Cohort {
    /// A hold that no task has received until now is released: the one at the front may not be
    /// polled for long.
    fn end(&self) {
        let mut state = self.state.lock();
        let had_time = self.has_time();
        self.is_ended.store(true, Ordering::Relaxed);
        let was = mem::replace(&mut *state, CohortState::Over);
        drop(state);
        if let CohortState::Held(front) = &was
            && !had_time
        {
            front.note_slow(!self.has_passed.load(Ordering::Relaxed));
        }
        drop(was); // not under the lock: it wakes a task, or leaves a release to the keeper
    }
}

/// Ends the turn when its time is over; or when the client's runtime ends before that, since a task
/// of another runtime may wait behind the holder.
struct EndOfTurn(Weak<Cohort>);

impl Drop for EndOfTurn {
    fn drop(&mut self) {
        self.0.upgrade().into_iter().for_each(|cohort| cohort.end());
    }
}

impl Drop for Cohort {
    fn drop(&mut self) {
        self.timer.get().into_iter().for_each(AbortHandle::abort);
    }
}
