//! Rules "exclusion", "backing" and "bounded loss": two holds that exclude each other are never
//! both trusted, and a trusted hold is on the server, except for a bounded time after the server
//! lost it.

use std::time::Duration;

use super::{Case, Hold, LostWindow, PROMPT, Verdict};
use crate::history::{Mode, Time, Verb};
use crate::observer::Observation;
use crate::plan::{Fault, NODE_TIMEOUT, TTL};
use crate::run::Window;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut missed: Vec<(&Hold, Time)> = Vec::new();
    let locks = case.by_lock();
    for (lock, holds) in &locks {
        overlaps(case, holds, &mut missed, verdict);
        unbacked(case, lock, holds, &mut missed, verdict);
    }
    // Several observations may show the loss of one hold: the first counts.
    missed.sort_by_key(|(hold, from)| (hold.number, *from));
    missed.dedup_by_key(|(hold, _)| hold.number);
    for (hold, from) in missed {
        let Some(fault) = case.lost_by(&hold.lock, hold.held_since(), from) else { continue };
        // A killed worker's leases are not counted as trusted.
        let Some(until) = hold.trusted_until().map(|until| until.min(hold.worker_ended)) else { continue };
        if until <= from {
            continue;
        }
        let to =
            back(case, hold, from, fault, &locks[hold.lock.as_str()]).map_or(until, |back| back.min(until));
        let span = to.since(from);
        verdict.lost_windows.push(LostWindow { fault, hold: hold.number, from, span });
        let limit = longest_trust(case, hold, from, to);
        if span > limit {
            let text = format!(
                "{} was trusted for {span:?} after {} had lost it; at most {limit:?} is allowed",
                case.describe(hold),
                fault.name()
            );
            verdict.violates("bounded loss", text);
        }
    }
}

/// How long a hold may be trusted after a server has lost it: until the next renewal is answered.
/// Faults of servers or of its worker delay the reply.
fn longest_trust(case: &Case<'_>, hold: &Hold, from: Time, to: Time) -> Duration {
    if !hold.is_renewed {
        return TTL;
    }
    // A fault that loses state delays a renewal only while no server replies.
    let silent = |window: &Window| {
        if window.lost.is_some() { window.away } else { Some((window.start, window.end)) }
    };
    let hit: Duration = case
        .delays(hold, from, to)
        .filter_map(silent)
        .map(|(start, end)| end.min(to).since(start.max(from)))
        .sum();
    let retry = if hit.is_zero() { Duration::ZERO } else { NODE_TIMEOUT };
    // A task that waits for a nested hold does not check the outer lease.
    let nested = case.holds.iter().filter(|inner| inner.inside == Some(hold.number));
    let unchecked: Duration =
        nested.map(|inner| inner.asked_until().unwrap_or(to).min(to).since(inner.wants.max(from))).sum();
    TTL / 3 + PROMPT + retry + hit + unchecked + case.stalled(from, to)
}

/// When the hold began to be trusted. A downgraded hold is trusted from the request on, since the
/// lock is not free in between.
fn since(hold: &Hold) -> Option<Time> {
    if hold.verb == Verb::Downgrade { Some(hold.wants) } else { hold.granted.map(|grant| grant.at) }
}

fn overlaps<'a>(
    case: &Case<'_>,
    holds: &[&'a Hold],
    missed: &mut Vec<(&'a Hold, Time)>,
    verdict: &mut Verdict,
) {
    // A worker that was stopped during a grant may learn of the grant after its lease has expired.
    // It then never trusts the lease: `from` is not before `to`.
    let mut spans: Vec<(Time, Time, &Hold)> = holds
        .iter()
        .filter_map(|hold| Some((since(hold)?, hold.trusted_until()?, *hold)))
        .filter(|(from, to, _)| from < to)
        .collect();
    spans.sort_by_key(|(from, to, _)| (*from, *to));
    let mut trusted: Vec<(Time, &Hold)> = Vec::new();
    for (from, to, hold) in spans {
        trusted.retain(|(to, _)| *to >= from);
        for (_, other) in trusted.iter().filter(|(_, other)| other.excludes(hold)) {
            // A hold may have been lost before its worker had the reply that granted it.
            let lost = [*other, hold]
                .into_iter()
                .find(|hold| case.lost_by(&hold.lock, hold.held_since(), from).is_some());
            if let Some(lost) = lost {
                missed.push((lost, from));
            } else {
                let text = format!("{} and {}", case.describe(other), case.describe(hold));
                verdict.violates("exclusion", text);
            }
        }
        trusted.push((to, hold));
    }
}

/// Finds observations that began and ended while a hold was trusted, and do not show it.
fn unbacked<'a>(
    case: &Case<'_>,
    lock: &str,
    holds: &[&'a Hold],
    missed: &mut Vec<(&'a Hold, Time)>,
    verdict: &mut Verdict,
) {
    // In a quorum no single node decides, so only the grants are compared.
    if case.plan.topology.nodes() > 1 {
        return;
    }
    let observations = observations(case, lock);
    for hold in holds.iter().filter(|hold| hold.mode == Mode::Exclusive) {
        let (Some(grant), Some(until)) = (hold.granted, hold.trusted_until()) else { continue };
        let first = observations.partition_point(|observation| observation.from <= grant.at);
        let during = observations[first..]
            .iter()
            .take_while(|observation| observation.from < until)
            .filter(|observation| observation.to < until);
        let is_shown = |observation: &Observation| {
            hold.is_in(observation) && !hold.is_before_another(observation, holds)
        };
        let mut missing = during.filter(|observation| !is_shown(observation));
        // During a failover two masters may reply, and a moving slot is on two masters.
        let missing = missing.find(|observation| {
            !found_elsewhere(&observations, observation, hold)
                && !has_two_masters(case, &observations, observation)
        });
        let Some(observation) = missing else { continue };
        if case.lost_by(&hold.lock, hold.held_since(), observation.to).is_some() {
            missed.push((hold, observation.from));
        } else {
            let text = format!(
                "{}: at {:.3} the server on port {} had the token {:?} of the owner {:?}",
                case.describe(hold),
                case.when(observation.from),
                observation.port,
                observation.held_with,
                observation.by
            );
            verdict.violates("backing", text);
        }
    }
}

fn observations<'a>(case: &'a Case<'_>, lock: &str) -> Vec<&'a Observation> {
    let mut observations: Vec<&Observation> =
        case.record.observations.iter().filter(|observation| observation.lock == lock).collect();
    observations.sort_by_key(|observation| observation.from);
    observations
}

/// The first observation of the hold after its loss: from then on it is backed again. If its waiter
/// is still queued in an old copy, or on a replica that had missed the grant, it is granted the
/// lock there.
fn back(case: &Case<'_>, hold: &Hold, lost: Time, fault: Fault, holds: &[&Hold]) -> Option<Time> {
    if case.plan.topology.nodes() > 1 {
        return None;
    }
    if hold.mode == Mode::Exclusive {
        let observations = observations(case, &hold.lock);
        let mut later = observations.iter().filter(|observation| {
            observation.from > lost && !has_two_masters(case, &observations, observation)
        });
        return later
            .find(|observation| may_have_it_again(hold, observation, fault, holds))
            .map(|observation| observation.from);
    }
    let of_reader =
        case.record.reader_ends.iter().filter(|seen| seen.lock == hold.lock && seen.owner == hold.owner);
    of_reader.filter(|seen| seen.from > lost && seen.ends.0 > seen.to).map(|seen| seen.from).min()
}

/// Whether the observation may show the hold again. An old queue grants the lock with a token that
/// no worker receives.
fn may_have_it_again(hold: &Hold, observation: &Observation, fault: Fault, holds: &[&Hold]) -> bool {
    let has_old_queues = matches!(fault, Fault::ServerSetBack | Fault::Failover);
    let is_received =
        |token: u64| holds.iter().any(|other| other.granted.is_some_and(|grant| grant.token == token));
    let may_be_same = observation.by.as_ref().is_none_or(|by| !hold.has_owner() || *by == hold.owner);
    let is_unreceived = observation.held_with.is_some_and(|token| !is_received(token));
    hold.is_in(observation) || has_old_queues && may_be_same && is_unreceived
}

/// Whether another server had the hold at about that time.
fn found_elsewhere(observations: &[&Observation], observation: &Observation, hold: &Hold) -> bool {
    others(observations, observation).any(|other| hold.is_in(other))
}

/// Whether a killed master runs again beside its replacement, before it is demoted. Then one of the
/// two lacks the other's grants. Clients should not use that one: if one does, the rules for tokens
/// and exclusion show it.
fn has_two_masters(case: &Case<'_>, observations: &[&Observation], observation: &Observation) -> bool {
    let mut failing_over = case.windows_during(observation.from, observation.to);
    failing_over.any(|window| window.fault == Fault::Failover)
        && others(observations, observation).next().is_some()
}

/// The observations of other servers at about that time.
fn others<'a>(
    observations: &'a [&Observation],
    observation: &'a Observation,
) -> impl Iterator<Item = &'a Observation> {
    let near = Duration::from_millis(200);
    let first = observations.partition_point(|other| other.from + near < observation.from);
    let around = observations[first..].iter().take_while(move |other| other.from < observation.to + near);
    around.copied().filter(|other| other.port != observation.port)
}
