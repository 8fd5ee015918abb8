//! Judges what a run left: what must never have happened, whatever was done to it.

mod dead_waiters;
mod deadlines;
mod decisions;
mod exclusion;
mod holds;
mod losses;
mod overtaking;
mod readers;
mod releases;
mod resources;
mod tokens;
mod waiting;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use crate::history::{Time, Verb, Why};
use crate::plan::{Fault, Plan, TTL};
use crate::run::{Record, Window};
pub use holds::Hold;

/// Something that must not happen.
#[derive(Clone, Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub text: String,
}

/// A hold that was trusted after the server had lost it: for how long.
#[derive(Clone, Debug)]
pub struct LostWindow {
    pub fault: Fault,
    pub hold: u64,
    /// When it was seen to be lost.
    pub from: Time,
    pub span: Duration,
}

/// All that is known of one run.
pub struct Case<'a> {
    pub plan: &'a Plan,
    pub record: &'a Record,
    pub holds: Vec<Hold>,
    /// The beginning, for people who read times.
    pub start: Time,
}

#[derive(Default)]
pub struct Verdict {
    pub acquisitions: usize,
    /// What was to be done, and could be.
    pub planned: Vec<Fault>,
    pub windows: BTreeMap<Fault, Vec<bool>>,
    pub violations: Vec<Violation>,
    pub lost_windows: Vec<LostWindow>,
    /// Why nothing can be concluded from the run.
    pub invalid: Vec<String>,
    pub rejected_writes: usize,
    pub lost_additions: u64,
    pub told_losses: usize,
    pub failures: BTreeMap<String, usize>,
}

/// What is due at some time is done by so much later, by whoever was let run.
pub const PROMPT: Duration = Duration::from_millis(250);

/// Fewer grants a second mean that little was tried: a machine with nothing else to do gives three times as many.
const LEAST_RATE: f64 = 20.0;

/// Where many of the holds last longer than a lease, fewer are granted.
const LEAST_RATE_LINGERING: f64 = 2.0;

pub fn judge(plan: &Plan, record: &Record, directory: &Path) -> Verdict {
    let holds = holds::read(directory);
    let start = holds.iter().map(|hold| hold.wants).min().unwrap_or(record.end);
    let case = Case { plan, record, holds, start };
    let acquisitions = case.holds.iter().filter(|hold| hold.granted.is_some()).count();
    let mut verdict = Verdict { acquisitions, ..Verdict::default() };
    for window in &record.windows {
        verdict.windows.entry(window.fault).or_default().push(window.effect.is_some());
    }
    verdict.planned = plan.faults.iter().copied().filter(|fault| case.can_do(*fault)).collect();
    for hold in &case.holds {
        if let Some((_, Why::Failed(error))) = &hold.not_granted {
            let (what, cause) = error.split_once(": ").unwrap_or((error, error));
            let kind = if what.contains("nodes took part") { "too few nodes took part" } else { cause };
            *verdict.failures.entry(kind.chars().take(80).collect()).or_default() += 1;
        }
    }
    exclusion::judge(&case, &mut verdict);
    tokens::judge(&case, &mut verdict);
    deadlines::judge(&case, &mut verdict);
    losses::judge(&case, &mut verdict);
    releases::judge(&case, &mut verdict);
    readers::judge(&case, &mut verdict);
    resources::judge(&case, &mut verdict);
    waiting::judge(&case, &mut verdict);
    overtaking::judge(&case, &mut verdict);
    decisions::judge(&case, &mut verdict);
    for text in &record.died {
        verdict.violates("worker died", text.clone());
    }
    for text in &record.left {
        verdict.violates("left behind", text.clone());
    }
    validate(&case, &mut verdict);
    verdict
}

/// A run in which nothing happened proves nothing.
fn validate(case: &Case<'_>, verdict: &mut Verdict) {
    for fault in &case.plan.faults {
        let windows = verdict.windows.get(fault);
        // A short run does not get to all of them, and one time proves little.
        if windows.is_some_and(|windows| windows.len() > 2 && !windows.contains(&true)) && case.can_do(*fault)
        {
            verdict.invalid.push(format!("{} had no effect", fault.name()));
        }
    }
    if !case.plan.faults.is_empty() && !verdict.windows.values().flatten().any(|effective| *effective) {
        verdict.invalid.push("no fault had an effect".to_owned());
    }
    let calm: Vec<&Hold> = case
        .holds
        .iter()
        .filter(|hold| {
            let end = hold.asked_until().unwrap_or(hold.wants);
            hold.verb != Verb::Downgrade && case.windows_during(hold.wants - TTL, end).next().is_none()
        })
        .collect();
    let answered = calm.iter().filter(|hold| !matches!(&hold.not_granted, Some((_, Why::Failed(_))))).count();
    if answered * 2 < calm.len() {
        verdict.invalid.push(format!("{answered} of {} requests without a fault were answered", calm.len()));
    }
    let stalled: Duration = case.record.stalls.iter().map(|(from, to)| to.since(*from)).sum();
    let rate = if case.plan.linger < 100 { LEAST_RATE_LINGERING } else { LEAST_RATE };
    let least = Duration::from_secs(case.plan.seconds).saturating_sub(stalled).as_secs_f64() * rate;
    if (verdict.acquisitions as f64) < least {
        verdict.invalid.push(format!("{} acquisitions are too few", verdict.acquisitions));
    }
    if stalled > Duration::from_secs(case.plan.seconds) / 10 {
        verdict.invalid.push(format!("the machine was busy with something else for {stalled:?}"));
    }
    let overslept = verdict.windows.get(&Fault::WorkerStopped).is_some_and(|windows| windows.len() > 5);
    if overslept && verdict.rejected_writes == 0 {
        verdict.invalid.push("workers were stopped, and no write was refused".to_owned());
    }
}

impl Case<'_> {
    pub fn windows_during(&self, from: Time, to: Time) -> impl Iterator<Item = &Window> {
        self.record.windows.iter().filter(move |window| window.start <= to && from <= window.end)
    }

    /// For how long the machine did something else meanwhile.
    pub fn stalled(&self, from: Time, to: Time) -> Duration {
        let stalls = self.record.stalls.iter().filter(|(start, end)| *start <= to && from <= *end);
        stalls.map(|(start, end)| end.since(*start)).sum()
    }

    /// A clock that cannot be set here said so when the run began.
    pub fn can_do(&self, fault: Fault) -> bool {
        !fault.sets_clock() || self.record.sets_clock
    }

    /// When something was done that may keep a hold from being renewed: to its worker, or to servers without which nothing is
    /// decided. Of a quorum, a node more or less does not matter.
    pub fn delays(&self, hold: &Hold, from: Time, to: Time) -> impl Iterator<Item = &Window> {
        let all_matter = self.plan.topology.nodes() == 1;
        self.windows_during(from, to).filter(move |window| match window.place {
            Some(place) => place == hold.place,
            None => all_matter || window.fault == Fault::Majority,
        })
    }

    /// Whether something was done to the servers or to the worker of a hold.
    pub fn is_hit(&self, hold: &Hold, from: Time, to: Time) -> bool {
        self.windows_during(from, to).any(|window| window.place.is_none_or(|place| place == hold.place))
    }

    /// The fault that had the servers lose what they had of a lock at `granted`, if it is lost at `seen`.
    pub fn lost_by(&self, lock: &str, granted: Time, seen: Time) -> Option<Fault> {
        let is_of =
            |window: &Window| window.of.as_ref().is_none_or(|locks| locks.iter().any(|it| it == lock));
        let lost = |window: &&Window| {
            window.lost.is_some_and(|(from, to)| granted <= to && from <= seen) && is_of(window)
        };
        self.record.windows.iter().filter(lost).map(|window| window.fault).next_back()
    }

    /// Seconds since the beginning.
    pub fn when(&self, time: Time) -> f64 {
        time.since(self.start).as_secs_f64()
    }

    pub fn say(&self, hold: &Hold) -> String {
        let number = hold.number;
        format!(
            "hold {}-{} of {} by {:.8} (wanted {:.3}, granted {:.3}, trusted until {:.3}, token {})",
            number >> 32,
            number & 0xffff_ffff,
            hold.lock,
            hold.owner,
            self.when(hold.wants),
            hold.granted.map_or(0.0, |grant| self.when(grant.at)),
            hold.trusted_until().map_or(0.0, |until| self.when(until)),
            hold.granted.map_or(0, |grant| grant.token),
        )
    }

    /// The holds of each lock that were granted, in the order of their grants.
    pub fn by_lock(&self) -> HashMap<&str, Vec<&Hold>> {
        let mut locks: HashMap<&str, Vec<&Hold>> = HashMap::new();
        for hold in self.holds.iter().filter(|hold| hold.granted.is_some()) {
            locks.entry(&hold.lock).or_default().push(hold);
        }
        for holds in locks.values_mut() {
            holds.sort_by_key(|hold| hold.granted.map(|grant| grant.at));
        }
        locks
    }
}

impl Verdict {
    pub fn violates(&mut self, rule: &'static str, text: String) {
        self.violations.push(Violation { rule, text });
    }
}
