//! [`JointHold`]: a hold that tasks of one client have together. Others may join it for a short
//! time, so that most of them send no request. [`Hold`]: that, or one of its own.
//!
//! ```text
//!                grant ├─ local_turn ─┤
//!     first task       ├────┤
//!     one that joins      ├──────────────────┤
//!     one that comes late              asks ────├────┤   a new hold, behind others that wait
//!     hold on the server ├───────────────────┤           until its last member has left
//! ```

use std::any::Any;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, MutexGuard, OnceLock};

use slab::Slab;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::task::coop::consume_budget;
use tokio::time::sleep;

use super::acquire::{Acquire, try_once, wait_in_redis};
use super::caller::Caller;
use super::client::Client;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::local_queue::LocalFront;
use super::local_wait::{LocalQueueOutcome, wait_in_local_queue};
use super::lock_request::{LockRequest, local_turn, shares};
use super::owned_lease::{OwnedLease, released_after};
use super::progress::Progress;
use super::turn::Turn;
use crate::clock::Moment;
use crate::error::{Error, Operation};
use crate::fencing::FencingToken;
use crate::guarded::Guarded;
use crate::measure::WakeReason;
use crate::traces::{Grant, HoldSpan, releasing};
use crate::wire::Together;

/// A hold of a kind that allows several.
pub(crate) enum Hold {
    /// One with an owner, for instance.
    Own(OwnedLease),
    Joint(JointHold),
}

/// A task's part in a hold, with a lease of its own. The last member that leaves releases the hold.
/// Dropped, it leaves, and the hold is released in the background.
pub(crate) struct JointHold {
    group: Arc<Group>,
    lease: Lease,
    span: HoldSpan,
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
    /// A task has joined, or no further one is expected, while `leaving` wait for that.
    changed: Notify,
    timer: OnceLock<AbortHandle>,
}

struct GroupState {
    /// `None` once it is being released.
    hold: Option<OwnedLease>,
    members: Slab<Caller>,
    /// Tasks wait that are to join it: one that holds it only for a moment must not release it
    /// before they run.
    expects_waiters: bool,
    /// How many tasks that were the last member wait for those: one of them releases the hold if
    /// none comes.
    leaving: usize,
    is_leaked: bool,
}

/// A task that waits as the last member. Dropped, the hold is left to the next, or to the keeper.
struct Leaving<'a>(&'a Group);

impl Acquire for Hold {
    async fn join(request: &LockRequest) -> Option<Hold> {
        if !request.shares() {
            return None;
        }
        consume_budget().await; // a task that does nothing else must let others run
        JointHold::join(request).map(Hold::Joint)
    }

    async fn try_once(request: &LockRequest) -> Result<Option<Hold>, Error> {
        Ok(try_once(request).await?.map(Hold::new))
    }

    /// One task asks for all that wait.
    async fn wait(request: &LockRequest, progress: &mut Progress) -> Result<Hold, Error> {
        if !request.shares() {
            return OwnedLease::wait(request, progress).await.map(Hold::Own);
        }
        loop {
            // Dropped last: what this task had is left to the keeper before the next one asks.
            let front = match wait_in_local_queue(request, progress).await? {
                LocalQueueOutcome::Entered(hold) => return Ok(Hold::Own(hold)),
                LocalQueueOutcome::Front(front) => front,
            };
            if let Some(part) = JointHold::join(request) {
                progress.woken = WakeReason::Local;
                return Ok(Hold::Joint(part));
            }
            // With other options, it waits in Redis, maybe for long, at the front: the hold is not
            // to last until then.
            request.client.joint_queues.end_turn(&request.name);
            // The last of those that were admitted together, and come too late.
            if !front.is_one_of_several() {
                let hold = wait_in_redis(request, progress, None).await?;
                return Ok(Hold::Joint(Group::begin(hold, Some(&front))));
            }
        }
    }
}

impl Hold {
    /// Other tasks may join it, if its options allow that.
    pub(crate) fn new(hold: OwnedLease) -> Hold {
        let attempt = hold.lease().attempt();
        if shares(attempt.kind, &attempt.options, attempt.owner.as_deref()) {
            Hold::Joint(Group::begin(hold, None))
        } else {
            Hold::Own(hold)
        }
    }

    pub(crate) fn lease(&self) -> &Lease {
        match self {
            Hold::Own(hold) => hold.lease(),
            Hold::Joint(part) => &part.lease,
        }
    }

    /// Releases the hold and waits for the reply, unless other tasks of this client still use it.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub(crate) async fn release(self, together: Option<&Together>) -> Result<(), Error> {
        match self {
            Hold::Own(hold) => hold.release(together).await,
            Hold::Joint(part) => part.release(together).await,
        }
    }

    /// The hold is never released from now on: it ends with its TTL, once no task uses it.
    pub(crate) fn leak(self) {
        match self {
            Hold::Own(hold) => _ = hold.leak(),
            Hold::Joint(mut part) => {
                part.group.state.lock().is_leaked = true;
                part.leave(LeaseEnd::Leaked, false);
            }
        }
    }

    /// The hold, if no other task of this client has a part in it.
    pub(crate) fn into_sole(self) -> Result<OwnedLease, Hold> {
        match self {
            Hold::Own(hold) => Ok(hold),
            Hold::Joint(part) => part.into_sole().map_err(Hold::Joint),
        }
    }
}

impl Grant for Hold {
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)> {
        match self {
            Hold::Own(hold) => hold.granted(),
            Hold::Joint(part) => Some((part.lease.fencing_token(), &mut part.span)),
        }
    }
}

impl JointHold {
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
            if state.hold.is_none() || state.is_leaked {
                return None;
            }
            if state.leaving > 0 {
                group.changed.notify_waiters();
            }
            state.members.insert(Caller::current())
        };
        Some(JointHold::new(group, place))
    }

    fn new(group: Arc<Group>, place: usize) -> JointHold {
        let lease = group.lease.of_member();
        JointHold { group, lease, span: HoldSpan::default(), place: Some(place) }
    }

    async fn release(mut self, together: Option<&Together>) -> Result<(), Error> {
        let (end, mut hold, is_last) = self.leave(LeaseEnd::Released, true);
        if is_last && hold.is_none() {
            hold = self.group.last_hold(Leaving(&self.group)).await;
        }
        if let Some(hold) = hold {
            return hold.release(together).await;
        }
        let (client, attempt) = (&self.group.client, self.lease.attempt());
        let what = (&attempt.name, attempt.kind.name, || attempt.owner());
        let left = pin!(async {
            match end {
                LeaseEnd::Released => Ok(()),
                end => released_after(end, client.context(Operation::Release, &attempt.name)),
            }
        });
        releasing(attempt.observer(), what, left).await
    }

    /// The hold, if this is its only member. Tasks that wait to join it ask the server.
    fn into_sole(mut self) -> Result<OwnedLease, JointHold> {
        let group = Arc::clone(&self.group);
        let mut state = group.state.lock();
        let Some(place) = self.place else { return Err(self) };
        if state.members.len() > 1 || state.is_leaked || self.lease.is_lost() {
            drop(state);
            return Err(self);
        }
        state.expects_waiters = false;
        state.members.try_remove(place);
        self.place = None;
        let hold = group.take_if_unused(state);
        self.end(LeaseEnd::Leaked);
        hold.ok_or(self)
    }

    /// Ends its lease. Returns how that ended, and the hold if no task uses it or is expected to;
    /// and whether it `waits` for others that are expected to join, since it was the last member.
    fn leave(&mut self, how: LeaseEnd, waits: bool) -> (LeaseEnd, Option<OwnedLease>, bool) {
        let Some(place) = self.place.take() else { return (how, None, false) };
        let end = self.end(how);
        let mut state = self.group.state.lock();
        state.members.try_remove(place);
        let is_last = waits && state.expects_waiters && state.members.is_empty() && state.hold.is_some();
        // Under the same lock: if the turn ended in between, the keeper would release the hold.
        state.leaving += usize::from(is_last);
        (end, self.group.take_if_unused(state), is_last)
    }

    fn end(&mut self, how: LeaseEnd) -> LeaseEnd {
        let end = self.lease.end_as(how);
        self.lease.announce();
        if end == LeaseEnd::Released {
            self.lease.note_passed();
        }
        self.lease.measure_end(end);
        self.span.end(end.word());
        end
    }
}

impl Drop for JointHold {
    fn drop(&mut self) {
        self.leave(LeaseEnd::Released, false);
    }
}

impl Group {
    /// The server has granted a hold to the task at the front, if it waited there.
    fn begin(hold: OwnedLease, front: Option<&LocalFront>) -> JointHold {
        let (client, lease) = (Arc::clone(hold.client()), hold.lease().clone());
        lease.note_shared();
        let attempt = lease.attempt();
        let now = Moment::now();
        let turn = local_turn(&attempt.options, attempt.owner.as_deref());
        let until = now + turn.min(lease.until().since(now) / 4);
        let mut members = Slab::new();
        let place = members.insert(Caller::current());
        let waited_for = front.filter(|front| front.has_waiters_behind());
        let state = GroupState {
            hold: Some(hold),
            members,
            expects_waiters: waited_for.is_some(),
            leaving: 0,
            is_leaked: false,
        };
        let (state, changed, timer) = (Guarded::new(state), Notify::new(), OnceLock::new());
        let group = Arc::new(Group { client, lease, until, state, changed, timer });
        let turn: Arc<dyn Turn> = Arc::<Group>::clone(&group);
        group.client.joint_queues.share_turn(group.lease.name(), Arc::downgrade(&turn));
        if let Some(front) = waited_for {
            group.wait_for_others();
            front.admit_all(Arc::downgrade(&turn));
        }
        JointHold::new(group, place)
    }

    /// Keeps the hold until the turn is over: no longer, since a task that waits may not be polled.
    fn wait_for_others(self: &Arc<Group>) {
        let group = Arc::clone(self);
        let timer = self.client.nodes.runtime().spawn(async move {
            sleep(group.until.since(Moment::now())).await;
            group.end();
        });
        self.timer.get_or_init(|| timer.abort_handle());
    }

    /// The hold, unless another task joins it. Called by the last member, which `leaving` counts:
    /// those that are expected may come too late, and then its release is to be confirmed.
    async fn last_hold(&self, _leaving: Leaving<'_>) -> Option<OwnedLease> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let outcome = {
                let state = self.state.lock();
                let is_decided = !state.members.is_empty() || !state.expects_waiters;
                is_decided.then(|| self.take_if_unused(state))
            };
            if let Some(hold) = outcome {
                return hold;
            }
            changed.await;
        }
    }

    /// The hold, once no task uses it.
    fn take_if_unused(&self, mut state: MutexGuard<'_, GroupState>) -> Option<OwnedLease> {
        if state.expects_waiters || !state.members.is_empty() {
            return None;
        }
        let hold = state.hold.take()?;
        let is_leaked = state.is_leaked;
        drop(state);
        self.client.joint_queues.unshare_turn(self.lease.name(), self);
        if is_leaked {
            hold.leak();
            return None;
        }
        Some(hold)
    }
}

impl Turn for Group {
    /// Tasks that wait ask the server.
    fn end(&self) {
        let mut state = self.state.lock();
        state.expects_waiters = false;
        if state.leaving > 0 {
            self.changed.notify_waiters();
        } else {
            drop(self.take_if_unused(state)); // released in the background
        }
        self.timer.get().into_iter().for_each(AbortHandle::abort);
    }

    fn queue_is_empty(&self) {
        self.end();
    }

    fn is_used_by(&self, caller: Caller) -> bool {
        self.state.lock().members.iter().any(|(_, member)| *member == caller)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.leaving -= 1;
        if state.leaving == 0 {
            drop(self.0.take_if_unused(state)); // released in the background
        }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease().fmt(f)
    }
}
