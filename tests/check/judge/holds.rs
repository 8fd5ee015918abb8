//! The events of each hold, collected from the histories.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::history::{self, End, Event, EventKind, FailureReason, Mode, Time, Verb};
use crate::observer::Observation;
use crate::plan::{TRUSTED, TTL};
use crate::worker_processes;

#[derive(Clone, Copy, Debug)]
pub struct Grant {
    pub at: Time,
    pub token: u64,
    pub until: Time,
}

/// How many tokens a client reserves at most.
const MOST_RESERVED: u64 = 1_000;

/// A hold from request to end. A missing event did not happen, or the worker was killed before it
/// recorded the event.
#[derive(Clone, Debug)]
pub struct Hold {
    pub number: u64,
    /// The place of its worker.
    pub place: usize,
    /// Whether its waiter is notified of a grant; otherwise it polls.
    pub is_notified: bool,
    pub lock: String,
    pub mode: Mode,
    pub owner: String,
    pub verb: Verb,
    pub inside: Option<u64>,
    pub is_renewed: bool,
    pub wants: Time,
    pub granted: Option<Grant>,
    pub not_granted: Option<(Time, FailureReason)>,
    /// When the lease reported that it is valid, and its deadline then.
    pub trusts: Vec<(Time, Time)>,
    /// When the lease reported that it is valid after its deadline, and that deadline.
    pub trusted_too_long: Option<(Time, Time)>,
    /// When the loss was reported, and the last deadline before that.
    pub lost: Option<(Time, Time)>,
    pub ends: Option<(Time, End)>,
    pub released: Option<(Time, Result<(), String>)>,
    /// Start, end, and whether the write was accepted.
    pub writes: Vec<(Time, Time, bool)>,
    /// Start and end.
    pub additions: Vec<(Time, Time)>,
    /// The time, the expected count, and the count on the server.
    pub counts: Vec<(Time, u64, u64)>,
    /// When its worker wrote the last line of its history.
    pub worker_ended: Time,
}

impl Hold {
    /// Until when the worker trusted the lease: its last deadline, or the release or the reported
    /// loss if that is earlier.
    pub fn trusted_until(&self) -> Option<Time> {
        let grant = self.granted?;
        let reported = self.trusts.iter().map(|(_, until)| *until).max();
        let ends = [self.ends.map(|(at, _)| at), self.lost.map(|(at, _)| at)];
        ends.into_iter().flatten().chain(reported.max(Some(grant.until))).min()
    }

    /// The earliest time from which the server may have had the hold: the server granted or renewed
    /// it before the worker received the reply. A nested hold may be granted inside the client
    /// alone, and is then as old as the outer hold; one that a task has passed on is as old as the
    /// hold of that task, from which its time counts.
    pub fn held_since(&self) -> Time {
        let Some(grant) = self.granted else { return self.wants };
        let sent = grant.at.min(grant.until - TTL);
        let is_passed = grant.until - TRUSTED + Duration::from_millis(1) < self.wants;
        if self.inside.is_none() && !is_passed { sent.max(self.wants) } else { sent }
    }

    /// When the request ended, granted or not.
    pub fn asked_until(&self) -> Option<Time> {
        self.granted.map(|grant| grant.at).or(self.not_granted.as_ref().map(|(at, _)| *at))
    }

    /// Whether the request queues while another hold excludes it. One of several locks queues only
    /// once those before it are held.
    pub fn may_queue(&self) -> bool {
        matches!(self.verb, Verb::Lock | Verb::Timeout)
    }

    /// A reader that becomes a writer overtakes those that wait.
    pub fn is_outer_exclusive(&self) -> bool {
        self.mode == Mode::Exclusive && self.inside.is_none()
    }

    /// Whether the worker chose the owner. Otherwise the server stores an owner that the history
    /// does not have.
    pub fn has_owner(&self) -> bool {
        self.owner != self.number.to_string()
    }

    /// Whether the observation shows this hold, if it is exclusive. A hold without an owner may be
    /// passed on inside its client: the counter then stands at the last token reserved for that.
    pub fn is_in(&self, observation: &Observation) -> bool {
        let (Some(grant), Some(last)) = (self.granted, observation.held_with) else { return false };
        if self.has_owner() {
            return last == grant.token && observation.by.as_ref().is_none_or(|by| *by == self.owner);
        }
        last >= grant.token && last - grant.token < MOST_RESERVED
    }

    /// Whether another client had been granted the lock after this one when it was observed.
    pub fn is_before_another(&self, observation: &Observation, holds: &[&Hold]) -> bool {
        let (Some(grant), Some(last)) = (self.granted, observation.held_with) else { return false };
        let others = holds.iter().filter(|other| other.worker() != self.worker());
        let mut before = others.filter_map(|other| other.granted).filter(|other| other.at < observation.from);
        before.any(|other| other.token > grant.token && other.token <= last)
    }

    /// The process, as every client of it numbers its holds.
    pub fn worker(&self) -> u64 {
        self.number >> 32
    }

    pub fn excludes(&self, other: &Hold) -> bool {
        self.owner != other.owner && (self.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
    }
}

/// Reads all holds of a run.
pub fn read(directory: &Path) -> Vec<Hold> {
    let mut holds = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if let Some(place) = worker_processes::place(&path) {
            holds.extend(put_together(place, history::read(&path)));
        }
    }
    holds.sort_by_key(|hold| hold.wants);
    holds
}

/// The holds of one history.
pub(super) fn put_together(place: usize, events: Vec<Event>) -> Vec<Hold> {
    let mut holds: BTreeMap<u64, Hold> = BTreeMap::new();
    let worker_ended = events.iter().map(|event| event.at).max();
    for Event { at, hold: number, what } in events {
        if let EventKind::Wants { lock, mode, owner, verb, inside, is_renewed } = what {
            holds.insert(
                number,
                Hold {
                    number,
                    place,
                    is_notified: worker_processes::is_notified(number >> 32),
                    lock,
                    mode,
                    owner,
                    verb,
                    inside,
                    is_renewed,
                    wants: at,
                    granted: None,
                    not_granted: None,
                    trusts: Vec::new(),
                    trusted_too_long: None,
                    lost: None,
                    ends: None,
                    released: None,
                    writes: Vec::new(),
                    additions: Vec::new(),
                    counts: Vec::new(),
                    worker_ended: worker_ended.unwrap_or(at),
                },
            );
            continue;
        }
        let Some(hold) = holds.get_mut(&number) else { panic!("hold {number} was never requested") };
        match what {
            EventKind::Wants { .. } => {}
            EventKind::Granted { token, until } => hold.granted = Some(Grant { at, token, until }),
            EventKind::NotGranted(why) => hold.not_granted = Some((at, why)),
            EventKind::Trusts { until } => hold.trusts.push((at, until)),
            EventKind::TrustsTooLong { until } => hold.trusted_too_long = Some((at, until)),
            EventKind::Lost { until } => hold.lost = Some((at, until)),
            EventKind::Ends(end) => hold.ends = Some((at, end)),
            EventKind::Released(outcome) => hold.released = Some((at, outcome)),
            EventKind::Wrote { since, is_accepted } => hold.writes.push((since, at, is_accepted)),
            EventKind::Added { since } => hold.additions.push((since, at)),
            EventKind::Counted { expected, seen } => hold.counts.push((at, expected, seen)),
        }
    }
    holds.into_values().collect()
}
