//! More than half of a quorum's nodes decide, and nobody else.

use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::arena::Window;
use crate::plan::Fault;

/// A minority that is away for so long, all times together, is enough to judge by the others.
const LONG: Duration = Duration::from_secs(2);

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let windows = |fault: Fault| case.record.windows.iter().filter(move |window| window.fault == fault);
    for window in windows(Fault::Majority) {
        if let Some(hold) = granted_in(case, window) {
            verdict.violates("decision", format!("{} was granted by a minority", case.say(hold)));
        }
    }
    let minorities: Vec<&Window> = windows(Fault::Minority).collect();
    let away = |window: &&Window| window.away.map_or(Duration::ZERO, |(from, to)| to.since(from));
    let together: Duration = minorities.iter().map(away).sum();
    if together > LONG && minorities.iter().all(|window| granted_in(case, window).is_none()) {
        let text = format!("a minority was away for {together:?}, and the others granted nothing");
        verdict.violates("decision", text);
    }
}

/// What was asked for and granted while they were away.
fn granted_in<'a>(case: &'a Case<'_>, window: &Window) -> Option<&'a Hold> {
    let (from, to) = window.away?;
    let within = |hold: &&Hold| {
        hold.inside.is_none() && hold.wants > from && hold.granted.is_some_and(|grant| grant.at < to)
    };
    case.holds.iter().find(within)
}
