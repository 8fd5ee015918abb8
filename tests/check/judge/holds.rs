//! What the histories say of each hold, put together.

use std::collections::BTreeMap;
use std::path::Path;

use crate::history::{self, End, Event, Mode, Time, Verb, What, Why};
use crate::observer::Observation;
use crate::plan::TTL;
use crate::workers;

#[derive(Clone, Copy, Debug)]
pub struct Grant {
    pub at: Time,
    pub token: u64,
    pub until: Time,
}

/// From wanting a lock to having given it back; whatever is missing did not happen, or nobody lived to say so.
#[derive(Clone, Debug)]
pub struct Hold {
    pub number: u64,
    /// Of its worker.
    pub place: usize,
    /// Whether it is told when it may enter; else it looks now and then.
    pub is_told: bool,
    pub lock: String,
    pub mode: Mode,
    pub owner: String,
    pub verb: Verb,
    pub inside: Option<u64>,
    pub renewed: bool,
    pub wants: Time,
    pub granted: Option<Grant>,
    pub not_granted: Option<(Time, Why)>,
    /// When the lease said that it may be trusted, and until when.
    pub trusts: Vec<(Time, Time)>,
    /// When the lease said so too late, and until when it was to be trusted.
    pub trusted_too_long: Option<(Time, Time)>,
    /// When the loss was told, and until when it was trusted before.
    pub lost: Option<(Time, Time)>,
    pub ends: Option<(Time, End)>,
    pub released: Option<(Time, Result<(), String>)>,
    /// Since when, until when, and whether it was accepted.
    pub writes: Vec<(Time, Time, bool)>,
    pub additions: Vec<(Time, Time)>,
    /// When, what was expected, and what was seen.
    pub counts: Vec<(Time, u64, u64)>,
    /// The last line of its worker.
    pub worker_ended: Time,
}

impl Hold {
    /// Until when its worker trusted it: told by the lease, unless it was given up or known to be lost before.
    pub fn trusted_until(&self) -> Option<Time> {
        let grant = self.granted?;
        let told = self.trusts.iter().map(|(_, until)| *until).max();
        let ends = [self.ends.map(|(at, _)| at), self.lost.map(|(at, _)| at)];
        ends.into_iter().flatten().chain(told.max(Some(grant.until))).min()
    }

    /// Since when the server may have had it: it was granted, or renewed, before that was known here. What is nested may be
    /// granted here alone, and is as old as the hold around it.
    pub fn held_since(&self) -> Time {
        let Some(grant) = self.granted else { return self.wants };
        let asked = grant.at.min(grant.until - TTL);
        if self.inside.is_none() { asked.max(self.wants) } else { asked }
    }

    /// When it was no longer wanted, or granted.
    pub fn asked_until(&self) -> Option<Time> {
        self.granted.map(|grant| grant.at).or(self.not_granted.as_ref().map(|(at, _)| *at))
    }

    /// Whether it queues while somebody else has the lock.
    pub fn may_queue(&self) -> bool {
        matches!(self.verb, Verb::Lock | Verb::Timeout)
    }

    /// Whether its owner was given with the request. Else the server alone knows it.
    pub fn has_owner(&self) -> bool {
        self.owner != self.number.to_string()
    }

    /// Whether a server had this hold, if it is one that excludes all others.
    pub fn is_in(&self, look: &Observation) -> bool {
        let is_its = look.by.as_ref().is_none_or(|by| !self.has_owner() || *by == self.owner);
        self.granted.is_some_and(|grant| look.held_with == Some(grant.token)) && is_its
    }

    pub fn excludes(&self, other: &Hold) -> bool {
        self.owner != other.owner && (self.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
    }
}

/// All holds of a run.
pub fn read(directory: &Path) -> Vec<Hold> {
    let mut holds = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if let Some(place) = workers::place(&path) {
            holds.extend(put_together(place, history::read(&path)));
        }
    }
    holds.sort_by_key(|hold| hold.wants);
    holds
}

fn put_together(place: usize, events: Vec<Event>) -> Vec<Hold> {
    let mut holds: BTreeMap<u64, Hold> = BTreeMap::new();
    let worker_ended = events.iter().map(|event| event.at).max();
    for Event { at, hold: number, what } in events {
        if let What::Wants { lock, mode, owner, verb, inside, renewed } = what {
            holds.insert(
                number,
                Hold {
                    number,
                    place,
                    is_told: workers::is_told(number >> 32),
                    lock,
                    mode,
                    owner,
                    verb,
                    inside,
                    renewed,
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
        let Some(hold) = holds.get_mut(&number) else { panic!("hold {number} was never wanted") };
        match what {
            What::Wants { .. } => {}
            What::Granted { token, until } => hold.granted = Some(Grant { at, token, until }),
            What::NotGranted(why) => hold.not_granted = Some((at, why)),
            What::Trusts { until } => hold.trusts.push((at, until)),
            What::TrustsTooLong { until } => hold.trusted_too_long = Some((at, until)),
            What::Lost { until } => hold.lost = Some((at, until)),
            What::Ends(end) => hold.ends = Some((at, end)),
            What::Released(outcome) => hold.released = Some((at, outcome)),
            What::Wrote { since, accepted } => hold.writes.push((since, at, accepted)),
            What::Added { since } => hold.additions.push((since, at)),
            What::Counted { expected, seen } => hold.counts.push((at, expected, seen)),
        }
    }
    holds.into_values().collect()
}
