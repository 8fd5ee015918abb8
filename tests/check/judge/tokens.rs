//! Rules "token order", "token unique", "nested token" and "count": fencing tokens grow with every
//! grant, no two writers share one, and a nested hold shares the outer hold's.

use std::collections::HashMap;

use super::holds::Grant;
use super::{Case, Hold, Verdict};
use crate::history::{Mode, Verb};

/// How many tokens a grant reserves at most.
const MOST_TOKENS: u64 = 1_000;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let numbered: HashMap<u64, &Hold> = case.holds.iter().map(|hold| (hold.number, hold)).collect();
    for holds in case.by_lock().values() {
        order(case, holds, &numbered, verdict);
    }
    for hold in &case.holds {
        let (Some(grant), Some(outer)) = (hold.granted, hold.inside.and_then(|inside| numbered.get(&inside)))
        else {
            continue;
        };
        let Some(around) = outer.granted else { continue };
        let upgraded = hold.mode == Mode::Exclusive && outer.mode == Mode::Shared;
        // A hold that is granted after the end of the outer one is not nested.
        let nested =
            outer.trusted_until().is_some_and(|until| until >= grant.at) || hold.verb == Verb::Downgrade;
        // A nested reader's token is at least that of the outer hold. In a quorum, the nodes agree
        // on a new token if those with the outer hold's token do not reply.
        let forgotten = case.plan.topology.nodes() > 1 && case.is_hit(hold, outer.wants, grant.at);
        let own = hold.mode == Mode::Shared && hold.verb != Verb::Downgrade || forgotten;
        let is_right = match (upgraded, own) {
            (true, _) => grant.token > around.token,
            (_, true) => grant.token >= around.token,
            _ => grant.token == around.token,
        };
        let ends = hold.trusted_until().map_or(grant.at, |until| until.max(grant.at));
        // A hold whose outer hold the servers have lost is not nested either.
        if case.lost_by(&outer.lock, outer.held_since(), ends).is_some() {
            continue;
        }
        if nested && !is_right {
            let text = format!("{} inside {}", case.describe(hold), case.describe(outer));
            verdict.violates("nested token", text);
        }
        // In a quorum, each hold has a majority of its own, and an inspection shows what one
        // majority has of both.
        let counts = hold.counts.iter().filter(|_| case.plan.topology.nodes() == 1);
        // A request whose reply was lost may count until it is released.
        let both = counts.filter(|(at, ..)| {
            outer.trusted_until().is_some_and(|until| until >= *at) && !case.is_hit(hold, outer.wants, *at)
        });
        for (_, expected, seen) in both.filter(|(_, expected, seen)| expected != seen) {
            let text = format!("{}: the server counted {seen} holds, not {expected}", case.describe(hold));
            verdict.violates("count", text);
        }
    }
}

/// A request that began after a worker knew of an earlier grant has a larger token. A reader's
/// token may be the same.
fn order(case: &Case<'_>, holds: &[&Hold], numbered: &HashMap<u64, &Hold>, verdict: &mut Verdict) {
    // A reader that is upgraded has another token as a writer.
    let is_upgrade = |hold: &Hold, outer: &Hold| hold.mode == Mode::Exclusive && outer.mode == Mode::Shared;
    let has_its_own = |hold: &&Hold| match hold.inside {
        None => true,
        Some(outer) => numbered.get(&outer).is_some_and(|outer| is_upgrade(hold, outer)),
    };
    let first: Vec<&Hold> = holds.iter().copied().filter(has_its_own).collect();
    let mut by_request = first.clone();
    by_request.sort_by_key(|hold| hold.wants);
    let mut known = first.iter().filter_map(|hold| Some((hold.granted?, *hold))).peekable();
    let mut largest: Option<(u64, &Hold)> = None;
    let mut largest_exclusive: Option<(u64, &Hold)> = None;
    for hold in by_request {
        while let Some((grant, earlier)) = known.next_if(|(grant, _)| grant.at < hold.wants) {
            if largest.is_none_or(|(token, _)| token < grant.token) {
                largest = Some((grant.token, earlier));
            }
            if earlier.mode == Mode::Exclusive
                && largest_exclusive.is_none_or(|(token, _)| token < grant.token)
            {
                largest_exclusive = Some((grant.token, earlier));
            }
        }
        let Some(grant) = hold.granted else { continue };
        excluded(case, hold, grant, &first, verdict);
        let bound = if hold.mode == Mode::Exclusive { largest } else { largest_exclusive };
        let Some((token, earlier)) = bound else { continue };
        let grows = if hold.mode == Mode::Exclusive { grant.token > token } else { grant.token >= token };
        if !grows && !is_of_a_lost_turn(case, hold, earlier, &first) {
            let text = format!("{} after {}", case.describe(hold), case.describe(earlier));
            verdict.violates("token order", text);
        }
    }
    let mut by_token: HashMap<u64, &Hold> = HashMap::new();
    for hold in first.iter().filter(|hold| hold.mode == Mode::Exclusive) {
        let Some(grant) = hold.granted else { continue };
        if let Some(other) = by_token.insert(grant.token, hold) {
            verdict.violates("token unique", format!("{} and {}", case.describe(other), case.describe(hold)));
        }
    }
}

/// Whether a task of its client passed the hold on to it, with a token that was reserved before the
/// servers lost it and granted the lock to the earlier holder: no client knows that before it asks.
fn is_of_a_lost_turn(case: &Case<'_>, hold: &Hold, earlier: &Hold, first: &[&Hold]) -> bool {
    let (Some(grant), Some(since)) = (hold.granted, earlier.granted) else { return false };
    let mut of_its_client = first.iter().filter(|other| other.worker() == hold.worker());
    of_its_client.any(|other| {
        let is_of_its_turn = other.granted.is_some_and(|began| {
            let later = grant.token.saturating_sub(began.token);
            began.at < since.at && (1..MOST_TOKENS).contains(&later)
        });
        is_of_its_turn && case.lost_by(&hold.lock, other.held_since(), grant.at).is_some()
    })
}

/// If two holds exclude each other and both waited, the later grant has the larger token, unless
/// the servers had lost one of them. A reader's token may be the same.
fn excluded(case: &Case<'_>, hold: &Hold, grant: Grant, first: &[&Hold], verdict: &mut Verdict) {
    // A grant that had expired when its reply arrived may be older than it seems.
    if hold.trusted_until().is_none_or(|until| until <= grant.at) {
        return;
    }
    let earlier_writers = first.iter().filter(|other| other.mode == Mode::Exclusive && other.excludes(hold));
    let earlier_writers = earlier_writers.filter_map(|other| Some((other.granted?, *other)));
    let earlier_writers =
        earlier_writers.filter(|(earlier, _)| hold.wants <= earlier.at && earlier.at < grant.at);
    let grows = |token: u64| match hold.mode {
        Mode::Exclusive => grant.token > token,
        Mode::Shared => grant.token >= token,
    };
    let mut wrong = earlier_writers.filter(|(earlier, _)| !grows(earlier.token));
    let is_lost = |other: &Hold| case.lost_by(&hold.lock, other.held_since(), grant.at).is_some();
    let wrong = wrong.find(|(_, other)| !is_lost(other) && !is_lost(hold));
    if let Some((_, earlier)) = wrong {
        let text = format!("{}, which waited for {}", case.describe(hold), case.describe(earlier));
        verdict.violates("token order", text);
    }
}
