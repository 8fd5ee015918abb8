//! What is given back was held until then, and is gone afterwards.

use std::collections::{HashMap, HashSet};

use super::{Case, Hold, Verdict};
use crate::history::{Mode, NOT_HELD};
use crate::observer::Observation;
use crate::plan::Fault;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut looks: HashMap<(&str, u64), Vec<&Observation>> = HashMap::new();
    for look in &case.record.observations {
        let Some(token) = look.held_with else { continue };
        looks.entry((&look.lock, token)).or_default().push(look);
    }
    // What is nested and not given back as well may be what the server has.
    let nested = case.holds.iter().filter(|hold| !matches!(hold.released, Some((_, Ok(())))));
    let kept_inside: HashSet<u64> = nested.filter_map(|hold| hold.inside).collect();
    for hold in &case.holds {
        was_held(case, hold, verdict);
        let Some(grant) = hold.granted else { continue };
        let counts = hold.inside.is_none() && !kept_inside.contains(&hold.number);
        if let Some(looks) = looks.get(&(hold.lock.as_str(), grant.token)).filter(|_| counts) {
            is_gone(case, hold, looks, verdict);
        }
    }
}

/// Who gives it back before its deadline finds it: nobody else had ended it.
fn was_held(case: &Case<'_>, hold: &Hold, verdict: &mut Verdict) {
    let (Some(grant), Some((at, Err(failure)))) = (hold.granted, &hold.released) else { return };
    // Where nodes come and go, a majority of others may be left.
    if failure != NOT_HELD || case.plan.topology.nodes() > 1 {
        return;
    }
    let until = hold.trusts.last().map_or(grant.until, |(_, until)| *until);
    if *at < until && case.lost_by(&hold.lock, hold.held_since(), *at).is_none() {
        let text = format!("{} was not found at {:.3}", case.say(hold), case.when(*at));
        verdict.violates("release", text);
    }
}

/// Who was told that it is given back: nobody who asks later sees it.
fn is_gone(case: &Case<'_>, hold: &Hold, looks: &[&Observation], verdict: &mut Verdict) {
    let (Some((ends, _)), Some((at, Ok(())))) = (hold.ends, &hold.released) else { return };
    let asked_once = !case.is_hit(hold, hold.wants, ends) && case.stalled(hold.wants, ends).is_zero();
    // What an owner was granted too late is given back in the background, and he may have entered again meanwhile.
    if hold.mode != Mode::Exclusive || hold.has_owner() && !asked_once {
        return;
    }
    // Of a quorum, a minority may keep for a while what the others have given back.
    let mut ports = HashSet::new();
    let mut kept = looks.iter().filter(|look| look.from > *at && hold.is_in(look));
    let kept = kept.find(|look| ports.insert(look.port) && ports.len() >= case.plan.topology.majority());
    // An old copy still has it: a node that was set back, or a master that was replaced and still
    // answers.
    let is_old = |look: &Observation| {
        let mut windows = case.windows_during(ends, look.to);
        let sets_back = |fault: Fault| matches!(fault, Fault::NodeSetBack | Fault::Failover);
        case.lost_by(&hold.lock, ends, look.to).is_some() || windows.any(|it| sets_back(it.fault))
    };
    if let Some(look) = kept
        && !is_old(look)
    {
        let text = format!(
            "{} was given back at {:.3}, and the server on port {} had it at {:.3}",
            case.say(hold),
            case.when(*at),
            look.port,
            case.when(look.from)
        );
        verdict.violates("release", text);
    }
}
