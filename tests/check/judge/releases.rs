//! Rule "release": a released hold was on the server until then, and is gone afterwards.

use std::collections::{HashMap, HashSet};

use super::{Case, Hold, Verdict};
use crate::history::{Mode, NOT_HELD};
use crate::observer::Observation;
use crate::plan::Fault;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut observations: HashMap<(&str, u64), Vec<&Observation>> = HashMap::new();
    for observation in &case.record.observations {
        let Some(token) = observation.held_with else { continue };
        observations.entry((&observation.lock, token)).or_default().push(observation);
    }
    // If a nested hold was not released, the server may still have that one, with the same token.
    let nested = case.holds.iter().filter(|hold| !matches!(hold.released, Some((_, Ok(())))));
    let kept_inside: HashSet<u64> = nested.filter_map(|hold| hold.inside).collect();
    for hold in &case.holds {
        was_held(case, hold, verdict);
        let Some(grant) = hold.granted else { continue };
        let counts = hold.inside.is_none() && !kept_inside.contains(&hold.number);
        if let Some(observations) = observations.get(&(hold.lock.as_str(), grant.token)).filter(|_| counts) {
            is_gone(case, hold, observations, verdict);
        }
    }
}

/// A release before the deadline finds the hold on the server.
fn was_held(case: &Case<'_>, hold: &Hold, verdict: &mut Verdict) {
    let (Some(grant), Some((at, Err(failure)))) = (hold.granted, &hold.released) else { return };
    // In a quorum, the nodes with the hold may be a minority of those that reply now.
    if failure != NOT_HELD || case.plan.topology.nodes() > 1 {
        return;
    }
    let until = hold.trusts.last().map_or(grant.until, |(_, until)| *until);
    if *at < until && case.lost_by(&hold.lock, hold.held_since(), *at).is_none() {
        let text =
            format!("{} was not on the server when released at {:.3}", case.describe(hold), case.when(*at));
        verdict.violates("release", text);
    }
}

/// After a successful release, no observation shows the hold.
fn is_gone(case: &Case<'_>, hold: &Hold, observations: &[&Observation], verdict: &mut Verdict) {
    let (Some((ends, _)), Some((at, Ok(())))) = (hold.ends, &hold.released) else { return };
    let was_sent_once = !case.is_hit(hold, hold.wants, ends) && !case.were_silent(hold.wants, ends);
    // An owner's late grant is released in the background, and the owner may have acquired the lock
    // again meanwhile.
    if hold.mode != Mode::Exclusive || hold.has_owner() && !was_sent_once {
        return;
    }
    // In a quorum, a minority may keep a released hold for a while.
    let mut ports = HashSet::new();
    let mut kept =
        observations.iter().filter(|observation| observation.from > *at && hold.is_in(observation));
    let kept = kept
        .find(|observation| ports.insert(observation.port) && ports.len() >= case.plan.topology.majority());
    // An old copy still has the hold: a node that was set back, or a replaced master that still
    // replies.
    let is_old = |observation: &Observation| {
        let mut windows = case.windows_during(ends, observation.to);
        let sets_back = |fault: Fault| matches!(fault, Fault::NodeSetBack | Fault::Failover);
        case.lost_by(&hold.lock, ends, observation.to).is_some()
            || windows.any(|window| sets_back(window.fault))
    };
    if let Some(observation) = kept
        && !is_old(observation)
    {
        let text = format!(
            "{} was released at {:.3}, but the server on port {} had it at {:.3}",
            case.describe(hold),
            case.when(*at),
            observation.port,
            case.when(observation.from)
        );
        verdict.violates("release", text);
    }
}
