//! Nobody trusts a hold while somebody whom it excludes trusts his, and while the servers do not have it.

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
    // Several may have shown the loss of one hold: the first counts.
    missed.sort_by_key(|(hold, from)| (hold.number, *from));
    missed.dedup_by_key(|(hold, _)| hold.number);
    for (hold, from) in missed {
        let Some(fault) = case.lost_by(&hold.lock, hold.held_since(), from) else { continue };
        // Who is dead trusts nothing.
        let Some(until) = hold.trusted_until().map(|until| until.min(hold.worker_ended)) else { continue };
        if until <= from {
            continue;
        }
        let to =
            back(case, hold, from, fault, &locks[hold.lock.as_str()]).map_or(until, |back| back.min(until));
        let span = to.since(from);
        verdict.lost_windows.push(LostWindow { fault, hold: hold.number, from, span });
        let notice = notice(case, hold, from, to);
        if span > notice {
            let text = format!(
                "{} was trusted for {span:?} after {} had it lost, not {notice:?}",
                case.say(hold),
                fault.name()
            );
            verdict.violates("bounded loss", text);
        }
    }
}

/// How long it may be trusted after a server has lost it: until the next renewal is answered, which whatever is done to
/// servers or to its worker puts off.
fn notice(case: &Case<'_>, hold: &Hold, from: Time, to: Time) -> Duration {
    if !hold.renewed {
        return TTL;
    }
    // Of a fault that has something lost, only the time in which nobody answers puts it off.
    let silent = |window: &Window| {
        if window.lost.is_some() { window.away } else { Some((window.start, window.end)) }
    };
    let hit: Duration = case
        .delays(hold, from, to)
        .filter_map(silent)
        .map(|(start, end)| end.min(to).since(start.max(from)))
        .sum();
    let asked_again = if hit.is_zero() { Duration::ZERO } else { NODE_TIMEOUT };
    // Whoever waits for a further hold does not look at the first one.
    let nested = case.holds.iter().filter(|inner| inner.inside == Some(hold.number));
    let looked_away: Duration =
        nested.map(|inner| inner.asked_until().unwrap_or(to).min(to).since(inner.wants.max(from))).sum();
    TTL / 3 + PROMPT + asked_again + hit + looked_away + case.stalled(from, to)
}

/// When somebody began to trust it: what a write hold became was never free.
fn since(hold: &Hold) -> Option<Time> {
    if hold.verb == Verb::Downgrade { Some(hold.wants) } else { hold.granted.map(|grant| grant.at) }
}

fn overlaps<'a>(
    case: &Case<'_>,
    holds: &[&'a Hold],
    missed: &mut Vec<(&'a Hold, Time)>,
    verdict: &mut Verdict,
) {
    // Whoever was stopped while he was granted it may know of it only when it is over: he never trusted it.
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
            // One may have been lost before it was known that it was granted: the answer was on its way.
            let lost =
                [*other, hold].into_iter().find(|it| case.lost_by(&it.lock, it.held_since(), from).is_some());
            if let Some(lost) = lost {
                missed.push((lost, from));
            } else {
                let text = format!("{} and {}", case.say(other), case.say(hold));
                verdict.violates("exclusion", text);
            }
        }
        trusted.push((to, hold));
    }
}

/// A look that began and ended while a hold was trusted, and did not find it.
fn unbacked<'a>(
    case: &Case<'_>,
    lock: &str,
    holds: &[&'a Hold],
    missed: &mut Vec<(&'a Hold, Time)>,
    verdict: &mut Verdict,
) {
    // In a quorum no single node tells; there, who is granted what tells.
    if case.plan.topology.nodes() > 1 {
        return;
    }
    let looks = looks(case, lock);
    for hold in holds.iter().filter(|hold| hold.mode == Mode::Exclusive) {
        let (Some(grant), Some(until)) = (hold.granted, hold.trusted_until()) else { continue };
        let first = looks.partition_point(|look| look.from <= grant.at);
        let during =
            looks[first..].iter().take_while(|look| look.from < until).filter(|look| look.to < until);
        let mut missing = during.filter(|look| !hold.is_in(look));
        // While a master is replaced, two may answer, and a slot that moves has two places.
        let missing =
            missing.find(|look| !found_elsewhere(&looks, look, hold) && !has_two_masters(case, &looks, look));
        let Some(look) = missing else { continue };
        if case.lost_by(&hold.lock, hold.held_since(), look.to).is_some() {
            missed.push((hold, look.from));
        } else {
            let text = format!(
                "{}: at {:.3} the server on port {} had {:?} by {:?}",
                case.say(hold),
                case.when(look.from),
                look.port,
                look.held_with,
                look.by
            );
            verdict.violates("backing", text);
        }
    }
}

fn looks<'a>(case: &'a Case<'_>, lock: &str) -> Vec<&'a Observation> {
    let mut looks: Vec<&Observation> =
        case.record.observations.iter().filter(|look| look.lock == lock).collect();
    looks.sort_by_key(|look| look.from);
    looks
}

/// When a server was first seen to have it again after that: whoever queues in an old copy as well, or at a replica that had
/// not heard of his grant, is granted it there. Then he has what he trusts.
fn back(case: &Case<'_>, hold: &Hold, lost: Time, fault: Fault, holds: &[&Hold]) -> Option<Time> {
    if case.plan.topology.nodes() > 1 {
        return None;
    }
    if hold.mode == Mode::Exclusive {
        let looks = looks(case, &hold.lock);
        let mut later = looks.iter().filter(|look| look.from > lost && !has_two_masters(case, &looks, look));
        return later.find(|look| may_have_it_again(hold, look, fault, holds)).map(|look| look.from);
    }
    let its =
        case.record.reader_ends.iter().filter(|seen| seen.lock == hold.lock && seen.owner == hold.owner);
    its.filter(|seen| seen.from > lost && seen.ends.0 > seen.to).map(|seen| seen.from).min()
}

/// Whether it may be his once more. Old queues grant it with a number that nobody is told.
fn may_have_it_again(hold: &Hold, look: &Observation, fault: Fault, holds: &[&Hold]) -> bool {
    let has_old_queues = matches!(fault, Fault::ServerSetBack | Fault::Failover);
    let is_told =
        |token: u64| holds.iter().any(|other| other.granted.is_some_and(|grant| grant.token == token));
    let may_be_his = look.by.as_ref().is_none_or(|by| !hold.has_owner() || *by == hold.owner);
    hold.is_in(look) || has_old_queues && may_be_his && look.held_with.is_some_and(|token| !is_told(token))
}

/// Whether another server had it at about that time.
fn found_elsewhere(looks: &[&Observation], look: &Observation, hold: &Hold) -> bool {
    others(looks, look).any(|other| hold.is_in(other))
}

/// Whether a master that was killed is back beside the one that replaced it, until it is told: then one of them does not
/// know what the other one grants. Nor does anybody ask it, or tokens and exclusion show it.
fn has_two_masters(case: &Case<'_>, looks: &[&Observation], look: &Observation) -> bool {
    let mut failing_over = case.windows_during(look.from, look.to);
    failing_over.any(|window| window.fault == Fault::Failover) && others(looks, look).next().is_some()
}

/// What other servers had at about that time.
fn others<'a>(looks: &'a [&Observation], look: &'a Observation) -> impl Iterator<Item = &'a Observation> {
    let near = Duration::from_millis(200);
    let first = looks.partition_point(|other| other.from + near < look.from);
    let around = looks[first..].iter().take_while(move |other| other.from < look.to + near);
    around.copied().filter(|other| other.port != look.port)
}
