//! The entrances of the calls that acquire locks: [`acquire`] and [`try_acquire`] one, [`adopt`]
//! one from a ticket, and [`try_all`] several, all or none. [`send_together`]: the releases of
//! those, as few requests.

use std::future::ready;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::attempt_guard::{AcquireOutcome, AttemptGuard, acquire_round};
use super::client::Client;
use super::hold::Hold;
use super::joint_hold::JointHold;
use super::keeper::OpenCall;
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::new_connection::last_token;
use super::owned_lease::OwnedLease;
use super::progress::{ContentionBackoff, Progress};
use super::release::{Decision, retry};
use super::wait_loop::wait;
use crate::clock::Moment;
use crate::error::{Error, Operation};
use crate::measure::WakeReason;
use crate::ticket::Ticket;
use crate::traces::acquiring;
use crate::wire::{Answer, Call, Failure, InFlight, Reply, Together, WaitFor};

/// How many more times to try without queueing, after nodes granted the lock to several attempts at
/// a time.
const MAX_RETRIES: u32 = 2;

/// Holds by the places of their requests.
type Placed = Vec<(usize, OwnedLease)>;

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

/// One try, and a few more if several attempts split the nodes so that none has a majority. `None`:
/// another client holds the lock.
async fn try_once(request: &LockRequest) -> Result<Option<OwnedLease>, Error> {
    let (mut guard, mut backoff) = (AttemptGuard::new(request, 1), ContentionBackoff::default());
    loop {
        match acquire_round(&mut guard).await {
            AcquireOutcome::Granted(lease) => return Ok(Some(OwnedLease::new(guard, lease))),
            AcquireOutcome::Busy { .. } => return Ok(None),
            AcquireOutcome::NoMajority { by, .. } => {
                if backoff.pauses == MAX_RETRIES || !guard.release_partial_grant(by).await {
                    guard.abandon();
                    return Ok(None);
                }
                sleep(backoff.pause()).await;
            }
            AcquireOutcome::Expired => return Err(request.lost()),
            AcquireOutcome::Failed(failure) => return Err(guard.error(failure)),
            AcquireOutcome::Refused(error) => return Err(error),
        }
    }
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

/// Continues the hold of a ticket as another attempt, of which at most one can: the server replaces
/// the attempt that has the hold, in one step.
///
/// # Cancel safety
/// Cancel safe: after a drop, the hold is released in the background if a request was sent.
pub(crate) async fn adopt(request: &LockRequest, ticket: &Ticket) -> Result<Hold, Error> {
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let mut adopting = pin!(async {
        let outcome = try_adopt(request, ticket).await.map(Hold::new);
        let woken = outcome.is_ok().then_some(WakeReason::AtOnce);
        (outcome, woken)
    });
    let traced = pin!(acquiring(request.described(), adopting.as_mut()));
    let hold = unless_closed(request, Operation::Adopt, traced).await?;
    Ok(hold.for_nested_calls(request))
}

async fn try_adopt(request: &LockRequest, ticket: &Ticket) -> Result<OwnedLease, Error> {
    let client = &request.client;
    let context = || client.context(Operation::Adopt, &request.name);
    let mut guard = AttemptGuard::new(request, 1 + ticket.spare_tokens);
    let attempt = Arc::clone(&guard.attempt);
    // Used, whatever becomes of this: a release takes back what follows it.
    attempt.note_token(ticket.fencing_token());
    let call = attempt.adopt(&ticket.attempt);
    // From here on, what the attempt gets is released if this fails or is dropped.
    guard.before_send();
    let sent = Moment::now();
    // Two that adopt the same hold may each have some nodes: only replies count.
    let may_trust_silence = false;
    let error = |failure: Failure| client.error(failure, context());
    let decided = retry(client, &attempt, &call, may_trust_silence).await;
    let Decision { answer, reply, .. } = decided.map_err(error)?;
    match answer {
        Answer::Final(1..) => {
            let token = ticket.fencing_token().and_then(|token| attempt.token(token.get()));
            let Some(lease) = Lease::granted(&attempt, token, sent) else {
                return Err(Error::Lost { context: context(), reason: None });
            };
            // A failover may have given the lock to another client and back: the counter of a lock
            // with one holder is then above its tokens.
            let own = attempt.last_own_token(token).filter(|_| attempt.kind.capacity.is_none());
            if let Some(own) = own.filter(|_| client.nodes.deployment.decides_alone()) {
                let (call, all_nodes) = (attempt.inspect(), client.nodes.all_nodes());
                let votes = client.nodes.ask(&call, all_nodes, &Arc::default(), WaitFor::All).await;
                match last_token(&votes.received) {
                    Some(last) if last > own => return Err(Error::Lost { context: context(), reason: None }),
                    Some(_) => {}
                    None => return Err(error(votes.failure())),
                }
            }
            // Nodes that have not answered get the hold by a repair.
            Ok(OwnedLease::new(guard, lease))
        }
        Answer::Final(0) => Err(Error::Lost { context: context(), reason: None }),
        _ => Err(client.refusal(&attempt, &reply, context())),
    }
}

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
    let lease = |(guard, token): (&AttemptGuard, &u64)| {
        let lease = Lease::granted(&guard.attempt, guard.attempt.token(*token), reply.sent);
        lease.ok_or_else(|| Error::Lost { context: guard.context(), reason: None })
    };
    let leases: Result<Vec<Lease>, Error> = guards.iter().zip(tokens).map(lease).collect();
    // All were granted: if one came late, each is to be released.
    let leases = leases.inspect_err(|_late| guards.iter_mut().for_each(AttemptGuard::abandon))?;
    Ok(guards.into_iter().zip(leases).map(|(guard, lease)| OwnedLease::new(guard, lease)).collect())
}

/// Runs a call that acquires. When the client is closed, the call is dropped, as its caller may
/// drop it at any time: that releases what it was granted and leaves the queue.
///
/// The caller has an [`OpenCall`], from before this checks whether the client is closed. `close`
/// works in the reverse order, so one of the two notices the other. An async function stores an
/// argument twice, so the call, which is large, is borrowed; it is dropped before its `OpenCall`.
async fn unless_closed<T>(
    request: &LockRequest,
    operation: Operation,
    mut call: Pin<&mut impl Future<Output = Result<T, Error>>>,
) -> Result<T, Error> {
    let keeper = &request.client.keeper;
    let context = || request.client.context(operation, &request.name);
    let outcome = tokio::select! {
        biased;
        _begun = keeper.closing.begun.wait() => None,
        outcome = request.client.run(call.as_mut(), context) => Some(outcome),
    };
    match outcome {
        // A lease that was granted after `close` took all leases is dropped here.
        Some(outcome) if !keeper.closing.has_begun() => outcome,
        _ => Err(Error::Closed { context: context() }),
    }
}
