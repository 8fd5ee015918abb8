//! The judge: applies the rules of docs/testing.md to the histories and observations of a run.

mod bounded_wait;
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
mod turns;
mod waiting;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use crate::history::{FailureReason, Time, Verb};
use crate::plan::{Fault, Plan, TTL};
use crate::run::{Record, Window};
pub use bounded_wait::assert_judges;
pub use holds::Hold;

/// One violation of a rule.
#[derive(Clone, Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub text: String,
}

/// A hold that was trusted after the server had lost it, and for how long.
#[derive(Clone, Debug)]
pub struct LostWindow {
    pub fault: Fault,
    pub hold: u64,
    /// The first observation of the loss.
    pub from: Time,
    pub span: Duration,
}

/// All data of one run.
pub struct Case<'a> {
    pub plan: &'a Plan,
    pub record: &'a Record,
    pub holds: Vec<Hold>,
    /// The first request: printed times count from it.
    pub start: Time,
}

#[derive(Default)]
pub struct Verdict {
    pub acquisitions: usize,
    /// The planned faults that this machine can inject.
    pub planned: Vec<Fault>,
    pub windows: BTreeMap<Fault, Vec<bool>>,
    pub violations: Vec<Violation>,
    pub lost_windows: Vec<LostWindow>,
    /// Why the run is invalid.
    pub invalid: Vec<String>,
    pub rejected_writes: usize,
    pub lost_additions: u64,
    pub reported_losses: usize,
    pub failures: BTreeMap<String, usize>,
}

/// The longest delay of an action that is due, not counting stalls.
pub const PROMPT: Duration = Duration::from_millis(250);

/// The least number of grants per second for a valid run. An idle machine reaches three times as
/// many.
const LEAST_RATE: f64 = 20.0;

/// As `LEAST_RATE`, for a run in which many holds last longer than a lease.
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
    verdict.planned = plan.faults.iter().copied().filter(|fault| case.is_injectable(*fault)).collect();
    for hold in &case.holds {
        if let Some((_, FailureReason::Failed(error))) = &hold.not_granted {
            let (_, cause) = error.split_once(": ").unwrap_or((error, error));
            // The text continues with numbers and ports, which differ.
            let kind = if cause.starts_with("no majority: ") { "no majority of nodes" } else { cause };
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
    turns::judge(&case, &mut verdict);
    bounded_wait::judge(&case, &mut verdict);
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

/// Finds the reasons why a run is invalid: too few faults with an effect, or too few grants.
fn validate(case: &Case<'_>, verdict: &mut Verdict) {
    for fault in &case.plan.faults {
        let windows = verdict.windows.get(fault);
        // A short run does not inject every fault, and one or two windows prove little.
        if windows.is_some_and(|windows| windows.len() > 2 && !windows.contains(&true))
            && case.is_injectable(*fault)
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
    let answered =
        calm.iter().filter(|hold| !matches!(&hold.not_granted, Some((_, FailureReason::Failed(_))))).count();
    if answered * 2 < calm.len() {
        verdict
            .invalid
            .push(format!("only {answered} of {} requests without a fault were answered", calm.len()));
    }
    let all = |stalls: &[(Time, Time)]| stalls.iter().map(|(from, to)| to.since(*from)).sum::<Duration>();
    let stalled = all(&case.record.stalls).max(all(&case.record.disk_stalls));
    let rate = if case.plan.linger < 100 { LEAST_RATE_LINGERING } else { LEAST_RATE };
    let least = Duration::from_secs(case.plan.seconds).saturating_sub(stalled).as_secs_f64() * rate;
    if (verdict.acquisitions as f64) < least {
        verdict.invalid.push(format!("{} acquisitions, at least {least:.0} expected", verdict.acquisitions));
    }
    // The rules leave stalls out: what is left of the run must not be the smaller part.
    if stalled > Duration::from_secs(case.plan.seconds) / 2 {
        verdict.invalid.push(format!("the machine or its disk was busy with other work for {stalled:?}"));
    }
    let had_stops = verdict.windows.get(&Fault::WorkerStopped).is_some_and(|windows| windows.len() > 5);
    if had_stops && verdict.rejected_writes == 0 {
        verdict.invalid.push("workers were stopped, but no late write was refused".to_owned());
    }
}

impl Case<'_> {
    pub fn windows_during(&self, from: Time, to: Time) -> impl Iterator<Item = &Window> {
        self.record.windows.iter().filter(move |window| window.start <= to && from <= window.end)
    }

    /// How long the machine ran other work between two times.
    pub fn stalled(&self, from: Time, to: Time) -> Duration {
        let stalls = self.record.stalls.iter().filter(|(start, end)| *start <= to && from <= *end);
        stalls.map(|(start, end)| end.since(*start)).sum()
    }

    /// When servers may have been silent without a fault: the machine or its disk was busy.
    pub fn silences(&self) -> impl Iterator<Item = (Time, Time)> {
        self.record.stalls.iter().chain(&self.record.disk_stalls).copied()
    }

    /// Whether servers may have been silent so between two times.
    pub fn were_silent(&self, from: Time, to: Time) -> bool {
        self.silences().any(|(start, end)| start <= to && from <= end)
    }

    /// Whether the fault can be injected on this machine: stepping a clock requires a C compiler.
    pub fn is_injectable(&self, fault: Fault) -> bool {
        !fault.sets_clock() || self.record.may_set_clock
    }

    /// The faults that may delay a hold's renewal: those of its worker and of servers. In a quorum,
    /// a fault of servers counts only if it stops a majority.
    pub fn delays(&self, hold: &Hold, from: Time, to: Time) -> impl Iterator<Item = &Window> {
        let all_matter = self.plan.topology.nodes() == 1;
        self.windows_during(from, to).filter(move |window| match window.place {
            Some(place) => place == hold.place,
            None => all_matter || window.fault == Fault::Majority,
        })
    }

    /// Whether a fault hit the servers or the worker of a hold.
    pub fn is_hit(&self, hold: &Hold, from: Time, to: Time) -> bool {
        self.windows_during(from, to).any(|window| window.place.is_none_or(|place| place == hold.place))
    }

    /// The fault by which servers lost a lock that was granted at `granted`, if it may be lost at
    /// `seen`.
    pub fn lost_by(&self, lock: &str, granted: Time, seen: Time) -> Option<Fault> {
        let may_have =
            |window: &Window| window.of.as_ref().is_none_or(|locks| locks.iter().any(|name| name == lock));
        let lost = |window: &&Window| {
            window.lost.is_some_and(|(from, to)| granted <= to && from <= seen) && may_have(window)
        };
        self.record.windows.iter().filter(lost).map(|window| window.fault).next_back()
    }

    /// Seconds since the first request.
    pub fn when(&self, time: Time) -> f64 {
        time.since(self.start).as_secs_f64()
    }

    pub fn describe(&self, hold: &Hold) -> String {
        let number = hold.number;
        format!(
            "hold {}-{} of {} by {:.8} (requested {:.3}, granted {:.3}, trusted until {:.3}, token {})",
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

    /// The granted holds of each lock, in the order of their grants.
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
