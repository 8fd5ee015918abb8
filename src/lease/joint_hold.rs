//! [`JointHold`]: a hold that tasks of one client have together. Others may join it for a short
//! time, so that most of them send no request.
//!
//! ```text
//!                grant ├─ local_turn ─┤
//!     first task       ├────┤
//!     one that joins      ├──────────────────┤
//!     one that comes late              asks ────├────┤   a new hold, behind others that wait
//!     hold on the server ├───────────────────┤           until its last member has left
//! ```

use std::any::Any;
use std::pin::pin;
use std::sync::{Arc, MutexGuard, OnceLock};

use slab::Slab;
use tokio::task::AbortHandle;
use tokio::task::coop::consume_budget;
use tokio::time::{sleep, timeout};

use super::client::Client;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::local_queue::LocalFront;
use super::lock_request::{LockRequest, local_turn};
use super::owned_lease::{OwnedLease, released_after};
use super::progress::Progress;
use super::turn::{Caller, Turn};
use super::wait_loop::{LocalQueueOutcome, wait_in_local_queue, wait_in_redis};
use crate::clock::Moment;
use crate::error::{Error, Operation};
use crate::guarded::Guarded;
use crate::measure::WakeReason;
use crate::traces::{HoldSpan, releasing};
use crate::wire::Together;

/// How many of the 128 units of work that tokio allows a task in a row a read counts for. It takes
/// less than a microsecond and waits for nothing: with one unit, 256 tasks that only read kept a
/// writer of their process waiting for 30 ms, since its tasks run several times before it writes.
const BUDGET_OF_A_READ: u32 = 4;

/// A task's part in a hold, with a lease of its own. The last member that leaves releases the hold.
/// Dropped, it leaves, and the hold is released in the background.
pub(crate) struct JointHold {
    group: Arc<Group>,
    lease: Lease,
    pub(super) span: HoldSpan,
    /// Its place among the members, until it leaves.
    place: Option<usize>,
}

/// Those that have one hold on the server.
struct Group {
    client: Arc<Client>,
    /// That of the hold, which the keeper renews.
    lease: Lease,
    /// Until when others may join.
    until: Moment,
    state: Guarded<GroupState>,
    timer: OnceLock<AbortHandle>,
}

struct GroupState {
    /// `None` once it is being released.
    hold: Option<OwnedLease>,
    members: Slab<Caller>,
    /// Tasks wait that are to join it: one that holds it only for a moment must not release it
    /// before they run.
    expects_waiters: bool,
    /// No more tasks join it: they may have found it before its turn was ended.
    has_ended: bool,
}

impl JointHold {
    /// The server has granted a hold to the task at the front, if it waited there.
    pub(super) fn begin(hold: OwnedLease, front: Option<&LocalFront>) -> JointHold {
        let (client, lease) = (Arc::clone(hold.client()), hold.lease().clone());
        lease.note_shared();
        let attempt = lease.attempt();
        let now = Moment::now();
        let turn = local_turn(&attempt.options, attempt.owner.as_ref());
        let until = now + turn.min(lease.until().since(now) / 4);
        let mut members = Slab::new();
        let place = members.insert(Caller::current());
        let waited_for = front.filter(|front| front.has_waiters_behind());
        let [expects_waiters, has_ended] = [waited_for.is_some(), false];
        let state = Guarded::new(GroupState { hold: Some(hold), members, expects_waiters, has_ended });
        let group = Arc::new(Group { client, lease, until, state, timer: OnceLock::new() });
        let turn: Arc<dyn Turn> = Arc::<Group>::clone(&group);
        group.client.joint_queues.share_turn(group.lease.name(), Arc::downgrade(&turn));
        // In this order: a revocation after the question finds the turn.
        if group.client.joint_queues.may_be_revoked(group.lease.name(), group.lease.counts_from()) {
            group.end();
        } else if let Some(front) = waited_for {
            group.wait_for_others();
            front.admit_all(Arc::downgrade(&turn));
        }
        JointHold::new(group, place)
    }

    /// A part in the newest hold of this client, without a wait: the short way of most readers.
    pub(super) async fn read(request: &LockRequest) -> Option<JointHold> {
        for _ in 0..BUDGET_OF_A_READ {
            consume_budget().await;
        }
        JointHold::join(request)
    }

    /// Waits in this client and in Redis. One task asks for all that wait.
    pub(super) async fn wait(request: &LockRequest, progress: &mut Progress) -> Result<JointHold, Error> {
        let mut was_late = false;
        loop {
            // Dropped last: what this task had is left to the keeper before the next one asks.
            let front = match wait_in_local_queue(request, progress).await? {
                LocalQueueOutcome::Entered(hold) => return Ok(JointHold::begin(hold, None)),
                LocalQueueOutcome::Front(front) => front,
            };
            if let Some(part) = JointHold::join(request) {
                progress.woken = WakeReason::Local;
                return Ok(part);
            }
            // It waits in Redis at the front, maybe for long: the hold before is not to last until
            // then. It may be late, or have other options.
            request.client.joint_queues.end_turn(&request.name);
            // Of those that were admitted together and come too late, the last one asks for all.
            // One that was late before asks for itself: where tasks are polled later than a turn
            // lasts, it would be late again, behind newer ones, as long as they come.
            if was_late || !front.is_one_of_several() {
                let hold = Box::pin(wait_in_redis(request, progress, None)).await?;
                return Ok(JointHold::begin(hold, Some(&front)));
            }
            was_late = true;
        }
    }

    /// Joins the newest hold of this client, if that may still be joined.
    fn join(request: &LockRequest) -> Option<JointHold> {
        let turn: Arc<dyn Any + Send + Sync> = request.client.joint_queues.shared_turn(&request.name)?;
        let group: Arc<Group> = turn.downcast().ok()?;
        let is_in_time = Moment::now() < group.until
            && !group.lease.is_lost()
            && !request.client.keeper.closing.has_begun()
            && !request.client.keeper.has_ended();
        if !is_in_time || !request.is_for(group.lease.attempt()) {
            return None;
        }
        let place = {
            let mut state = group.state.lock();
            if state.hold.is_none() || group.lease.is_leaked() || state.has_ended {
                return None;
            }
            state.members.insert(Caller::current())
        };
        Some(JointHold::new(group, place))
    }

    fn new(group: Arc<Group>, place: usize) -> JointHold {
        let lease = group.lease.of_member();
        JointHold { group, lease, span: HoldSpan::default(), place: Some(place) }
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(super) async fn release(mut self, together: Option<&Together>) -> Result<(), Error> {
        let (end, hold) = self.leave(LeaseEnd::Released);
        self.span.end(end.word());
        let (client, attempt) = (&self.group.client, self.lease.attempt());
        if let Some(hold) = hold {
            let outcome = hold.release(together).await;
            // A hold before this one may have ended while tasks were to join it: these came too
            // late, and have left this one. The keeper releases the former.
            let released = client.keeper.released(&attempt.name);
            let released = pin!(async { timeout(attempt.options.node_timeout, released).await });
            // That would wait for a node of a quorum that hangs, too.
            if !client.nodes.is_failing(&attempt.name) {
                let _in_time = client.with_runtime(released).await;
            }
            return outcome;
        }
        let what = (&attempt.name, attempt.kind.name, || attempt.owner());
        let left = pin!(async {
            match end {
                LeaseEnd::Released => Ok(()),
                end => released_after(&self.lease, end, client.context(Operation::Release, &attempt.name)),
            }
        });
        releasing(&attempt.origin.observer, what, left).await
    }

    /// The hold is never released from now on, once its last member has left.
    pub(super) fn leak(mut self) {
        self.group.lease.note_leaked();
        self.leave(LeaseEnd::Leaked);
        self.span.end(LeaseEnd::Leaked.word());
    }

    /// The hold, if this is its only member. Tasks that wait to join it ask the server.
    pub(super) fn into_sole(mut self) -> Result<OwnedLease, JointHold> {
        let group = Arc::clone(&self.group);
        let mut state = group.state.lock();
        let Some(place) = self.place else { return Err(self) };
        if state.members.len() > 1 || group.lease.is_leaked() || self.lease.is_lost() {
            drop(state);
            return Err(self);
        }
        state.expects_waiters = false;
        state.members.try_remove(place);
        self.place = None;
        let hold = group.take_if_unused(state);
        let end = self.end(LeaseEnd::Leaked);
        self.span.end(end.word());
        hold.ok_or(self)
    }

    /// Ends its lease. Returns how that ended, and the hold if it was the last member.
    fn leave(&mut self, how: LeaseEnd) -> (LeaseEnd, Option<OwnedLease>) {
        let Some(place) = self.place.take() else { return (how, None) };
        let end = self.end(how);
        let mut state = self.group.state.lock();
        state.members.try_remove(place);
        (end, self.group.take_if_unused(state))
    }

    fn end(&mut self, how: LeaseEnd) -> LeaseEnd {
        let end = self.lease.end_as(how);
        self.lease.announce();
        if end == LeaseEnd::Released {
            self.lease.note_passed(true);
        }
        self.lease.measure_end(end);
        end
    }
}

impl Drop for JointHold {
    fn drop(&mut self) {
        if self.place.is_some() {
            let (end, hold) = self.leave(LeaseEnd::Released);
            // Otherwise the release of the hold is reported.
            if hold.is_none() && end == LeaseEnd::Released {
                self.lease.attempt().report_release();
            }
        }
    }
}

impl Group {
    /// Keeps the hold until the turn is over: no longer, since a task that waits may not be polled.
    fn wait_for_others(self: &Arc<Group>) {
        let group = Arc::clone(self);
        let timer = self.client.nodes.runtime.spawn(async move {
            sleep(group.until.since(Moment::now())).await;
            group.end();
        });
        self.timer.get_or_init(|| timer.abort_handle());
    }

    /// The hold, once no task uses it.
    fn take_if_unused(&self, mut state: MutexGuard<'_, GroupState>) -> Option<OwnedLease> {
        if state.expects_waiters || !state.members.is_empty() {
            return None;
        }
        let hold = state.hold.take()?;
        drop(state);
        self.client.joint_queues.unshare_turn(self.lease.name(), self);
        if self.lease.is_leaked() {
            hold.leak();
            return None;
        }
        Some(hold)
    }
}

impl Turn for Group {
    /// Tasks that wait ask the server.
    fn end(&self) {
        self.state.lock().has_ended = true;
        self.queue_is_empty();
    }

    fn queue_is_empty(&self) {
        let mut state = self.state.lock();
        state.expects_waiters = false;
        if let Some(hold) = self.take_if_unused(state) {
            hold.lease().attempt().note_idle(true);
            drop(hold); // released in the background
        }
        self.timer.get().into_iter().for_each(AbortHandle::abort);
    }

    fn is_used_by(&self, caller: Caller) -> bool {
        self.state.lock().members.iter().any(|(_, member)| *member == caller)
    }
}
