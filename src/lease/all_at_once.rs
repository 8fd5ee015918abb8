//! [`try_all`]: one try for several locks, of which it acquires all or none. [`send_together`]:
//! their releases, as few requests.

use std::future::ready;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::attempt_guard::AttemptGuard;
use super::client::Client;
use super::close::OpenCall;
use super::hold::Hold;
use super::lease::Lease;
use super::lock_request::{LockRequest, unless_closed};
use super::owned_lease::OwnedLease;
use super::progress::Progress;
use super::wait_loop::try_once;
use crate::clock::Moment;
use crate::error::{Error, Operation};
use crate::measure::WakeReason;
use crate::traces::acquiring;
use crate::wire::{Call, InFlight, Reply, Together, WaitFor};

/// Acquires all of these locks. `None`: another client holds one of them, or waits for it, and none
/// is held.
///
/// # Cancel safety
/// Cancel safe: after a drop, everything that was granted is released in the background.
pub(crate) async fn try_all(requests: &[&LockRequest]) -> Result<Option<Vec<Hold>>, Error> {
    let Some(first) = requests.first() else { return Ok(Some(Vec::new())) };
    let open = |request: &&LockRequest| OpenCall::new(&request.client.keeper, &request.name);
    let _open: Vec<OpenCall> = requests.iter().map(open).collect();
    let Some(holds) = unless_closed(first, Operation::Acquire, pin!(try_groups(requests))).await? else {
        return Ok(None);
    };
    let mut granted = Vec::with_capacity(holds.len());
    for (hold, request) in holds.into_iter().zip(requests) {
        let call = pin!(ready((Ok(Hold::new(hold)), Some(WakeReason::AtOnce))));
        granted.push(acquiring(request.described(), call).await?.for_nested_calls(request));
    }
    Ok(Some(granted))
}

/// The error of a try that was dropped at its limit. It may have had an effect, which is undone.
/// There is at least one lock.
pub(crate) fn out_of_time(requests: &[&LockRequest], limit: Duration) -> Error {
    let failing = requests.iter().find(|request| request.outage().is_some());
    let in_flight = Arc::<InFlight>::default();
    in_flight.mark_unknown();
    let progress = Progress { in_flight: Some(in_flight), ..Progress::default() };
    progress.out_of_time(failing.unwrap_or(&requests[0]), limit)
}

/// Sends the first requests of releases that were begun together.
pub(crate) async fn send_together(client: &Client, together: &Together) {
    let sent = client.with_runtime(pin!(client.nodes.send_together(together))).await;
    if sent.is_none() {
        together.give_up(); // the runtime has ended, which each release reports
    }
}

/// Tries one group of locks after the other, each in one call.
async fn try_groups(requests: &[&LockRequest]) -> Result<Option<Vec<OwnedLease>>, Error> {
    let mut holds: Vec<Option<OwnedLease>> = requests.iter().map(|_| None).collect();
    for group in groups(requests) {
        let members: Vec<&LockRequest> = group.iter().map(|place| requests[*place]).collect();
        let granted = match members.as_slice() {
            [request] => try_once(request).await?.map(|hold| vec![hold]),
            members => try_group(members).await?,
        };
        let Some(granted) = granted else {
            release(holds.into_iter().flatten()).await;
            return Ok(None);
        };
        for (place, hold) in group.into_iter().zip(granted) {
            holds[place] = Some(hold);
        }
    }
    Ok(Some(holds.into_iter().flatten().collect()))
}

/// The places of the locks that one call may have. On a quorum, and if replicas must confirm a
/// grant, each lock has a call of its own: its nodes agree on a token, or its grant is waited for.
fn groups(requests: &[&LockRequest]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (place, request) in requests.iter().enumerate() {
        let nodes = &request.client.nodes;
        let is_alone = !nodes.deployment.decides_alone() || request.options.wants_replicas().is_some();
        let joins = |group: &&mut Vec<usize>| {
            let other = &requests[group[0]];
            !is_alone
                && request.has_terms(other.kind, &other.options)
                && nodes.have_one_slot(&request.name, &other.name)
        };
        match groups.iter_mut().find(joins) {
            Some(group) => group.push(place),
            None => groups.push(vec![place]),
        }
    }
    groups
}

/// One call for all of these, on one server.
async fn try_group(requests: &[&LockRequest]) -> Result<Option<Vec<OwnedLease>>, Error> {
    let client = &requests[0].client;
    if client.keeper.has_ended() {
        return Err(requests[0].runtime_ended());
    }
    client.nodes.open().await;
    let mut guards: Vec<AttemptGuard> =
        requests.iter().map(|request| AttemptGuard::new(request, 1)).collect();
    let call = Call::for_all(guards.iter().map(|guard| guard.attempt.acquire(None, None)).collect());
    guards.iter_mut().for_each(AttemptGuard::before_send);
    let (nodes, in_flight) = (client.nodes.all_nodes(), Arc::default());
    let votes = client.nodes.ask(&Arc::new(call), nodes, &in_flight, WaitFor::Majority(0)).await;
    for guard in &mut guards {
        guard.record(&votes, true);
        if in_flight.is_indeterminate() {
            guard.attempt.in_flight.mark_unknown();
        }
    }
    match votes.received.into_iter().next() {
        Some((_, Ok(reply))) => match reply.tokens(requests.len()) {
            Some(tokens) => granted(guards, &tokens, &reply).map(Some),
            None if reply.has_busy_lock() => Ok(None),
            None => {
                // Taking back what it had granted may have failed as well.
                guards.iter_mut().for_each(AttemptGuard::abandon);
                one_by_one(requests).await
            }
        },
        // It may concern one of them, and changed nothing.
        Some((_, Err(failure))) if !failure.is_transient() && !failure.is_indeterminate() => {
            one_by_one(requests).await
        }
        Some((_, Err(failure))) => Err(guards[0].error(failure)),
        None => Err(requests[0].runtime_ended()),
    }
}

fn granted(mut guards: Vec<AttemptGuard>, tokens: &[u64], reply: &Reply) -> Result<Vec<OwnedLease>, Error> {
    let until = |guard: &AttemptGuard| reply.sent + guard.attempt.trusted_span(guard.attempt.options.ttl);
    let now = Moment::now();
    if let Some(late) = guards.iter().find(|guard| now >= until(guard)) {
        let context = late.context();
        // All were granted: each is to be released.
        guards.iter_mut().for_each(AttemptGuard::abandon);
        return Err(Error::Lost { context, reason: None });
    }
    let hold = |(guard, token): (AttemptGuard, &u64)| {
        let (attempt, until) = (Arc::clone(&guard.attempt), until(&guard));
        let lease = Lease::new(Arc::clone(&attempt), attempt.token(*token), reply.sent, until, None);
        OwnedLease::new(guard, lease)
    };
    Ok(guards.into_iter().zip(tokens).map(hold).collect())
}

/// Finds the lock that was refused, and why.
async fn one_by_one(requests: &[&LockRequest]) -> Result<Option<Vec<OwnedLease>>, Error> {
    let mut holds = Vec::with_capacity(requests.len());
    for request in requests {
        let Some(hold) = try_once(request).await? else {
            release(holds).await;
            return Ok(None);
        };
        holds.push(hold);
    }
    Ok(Some(holds))
}

/// Releases what is of no use without the others, so that none of it is held any more.
async fn release(holds: impl IntoIterator<Item = OwnedLease>) {
    for hold in holds {
        // A failed release is logged, and repeated in the background.
        let _logged = hold.release(None).await;
    }
}
