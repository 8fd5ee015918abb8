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

/// Holds by the places of their requests.
type Placed = Vec<(usize, OwnedLease)>;

/// Acquires all of these locks; those that an owner has already, without a request. `None`: another
/// client holds one of them, or waits for it, and none is held.
///
/// # Cancel safety
/// Cancel safe: after a drop, everything that was granted is released in the background.
pub(crate) async fn try_all(requests: &[&LockRequest]) -> Result<Option<Vec<Hold>>, Error> {
    let mut holds: Vec<Option<Hold>> =
        requests.iter().map(|request| Hold::enter(request)).collect::<Result<_, Error>>()?;
    let asking: Vec<usize> = (0..requests.len()).filter(|place| holds[*place].is_none()).collect();
    let open = |place: &usize| OpenCall::new(&requests[*place].client.keeper, &requests[*place].name);
    let _open: Vec<OpenCall> = asking.iter().map(open).collect();
    if let Some(first) = asking.first() {
        let trying = pin!(try_groups(requests, groups(requests, &asking)));
        let granted = unless_closed(requests[*first], Operation::Acquire, trying).await?;
        let Some(mut granted) = granted else { return Ok(None) };
        granted.sort_unstable_by_key(|(place, _)| *place);
        for (place, hold) in granted {
            let call = pin!(ready((Ok(Hold::new(hold)), Some(WakeReason::AtOnce))));
            let hold = acquiring(requests[place].described(), call).await?;
            holds[place] = Some(hold.for_nested_calls(requests[place]));
        }
    }
    Ok(Some(holds.into_iter().flatten().collect()))
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

/// Tries one group of locks after the other, each in one call. The holds come with their places.
async fn try_groups(requests: &[&LockRequest], groups: Vec<Vec<usize>>) -> Result<Option<Placed>, Error> {
    let mut holds = Placed::new();
    for group in groups {
        let granted = match group.as_slice() {
            [place] => try_once(requests[*place]).await?.map(|hold| vec![(*place, hold)]),
            places => try_group(requests, places).await?,
        };
        let Some(granted) = granted else {
            // They are of no use without the others. A failed release is logged, and repeated in
            // the background.
            for (_, hold) in holds {
                let _logged = hold.release(None).await;
            }
            return Ok(None);
        };
        holds.extend(granted);
    }
    Ok(Some(holds))
}

/// The places of the locks that one call may have. On a quorum, and if replicas must confirm a
/// grant, each lock has a call of its own: its nodes agree on a token, or its grant is waited for.
fn groups(requests: &[&LockRequest], asking: &[usize]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for place in asking.iter().copied() {
        let request = requests[place];
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
async fn try_group(requests: &[&LockRequest], places: &[usize]) -> Result<Option<Placed>, Error> {
    let first = requests[places[0]];
    let client = &first.client;
    if client.keeper.has_ended() {
        return Err(first.runtime_ended());
    }
    client.nodes.open().await;
    let mut guards: Vec<AttemptGuard> =
        places.iter().map(|place| AttemptGuard::new(requests[*place], 1)).collect();
    // Finds the lock that was refused, and why.
    let one_by_one = || Box::pin(try_groups(requests, places.iter().map(|place| vec![*place]).collect()));
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
        Some((_, Ok(reply))) => match reply.tokens(places.len()) {
            Some(tokens) => granted(guards, &tokens, &reply)
                .map(|holds| Some(places.iter().copied().zip(holds).collect())),
            None if reply.has_busy_lock() => Ok(None),
            None => {
                // Taking back what it had granted may have failed as well.
                guards.iter_mut().for_each(AttemptGuard::abandon);
                one_by_one().await
            }
        },
        // It may concern one of them, and changed nothing.
        Some((_, Err(failure))) if !failure.is_transient() && !failure.is_indeterminate() => {
            one_by_one().await
        }
        Some((_, Err(failure))) => Err(guards[0].error(failure)),
        None => Err(first.runtime_ended()),
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
