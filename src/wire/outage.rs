//! [`OutageRecord`]: since when a node has failed, and what is said of it: once when it begins, and
//! once when it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::failure::Failure;
use crate::clock::Moment;
use crate::events::{Event, Observer};
use crate::guarded::Guarded;
use crate::measure;
use crate::traces::{Report, event};

/// Whether one node fails.
pub(super) struct OutageRecord {
    outage: Guarded<Option<(Moment, Failure)>>,
    /// Whether there is an outage: read without taking the lock.
    is_failing: AtomicBool,
    label: Arc<str>,
    /// Reports that were not logged yet.
    reports: Guarded<Vec<Report>>,
    /// The number of locks that the client holds.
    holds: Arc<AtomicUsize>,
    observer: Arc<Observer>,
}

impl OutageRecord {
    pub(super) fn new(label: &Arc<str>, holds: &Arc<AtomicUsize>, observer: &Arc<Observer>) -> OutageRecord {
        OutageRecord {
            outage: Guarded::default(),
            is_failing: AtomicBool::new(false),
            label: Arc::clone(label),
            reports: Guarded::default(),
            holds: Arc::clone(holds),
            observer: Arc::clone(observer),
        }
    }

    /// Since when the node has failed, and with which failure, if it does. Missing replicas count
    /// only for a request that requires them.
    pub(super) fn current(&self, replicas: u32) -> Option<(Moment, Failure)> {
        if !self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let outage = self.outage.lock().clone();
        outage.filter(|(_, failure)| failure.replicas().is_none_or(|wanted| replicas >= wanted))
    }

    /// Records the outcome of a request, and reports an outage that begins or ends.
    pub(super) fn note_and_report(&self, failure: Option<&Failure>) {
        if let Some(report) = self.note(failure) {
            report();
        }
    }

    /// Records the outcome of requests. What there is to report waits for
    /// [`take_reports`](OutageRecord::take_reports).
    pub(super) fn note_for_later(&self, failure: Option<&Failure>) {
        let report = self.note(failure);
        self.reports.lock().extend(report);
    }

    /// The reports that were not logged yet.
    pub(super) fn take_reports(&self) -> Vec<Report> {
        std::mem::take(&mut *self.reports.lock())
    }

    /// Records an outage that begins or ends. Returns the report of it.
    fn note(&self, failure: Option<&Failure>) -> Option<Report> {
        let described = || (Arc::clone(&self.label), self.holds.load(Ordering::Relaxed));
        match failure.filter(|failure| failure.is_transient()) {
            Some(failure) => {
                let mut outage = self.outage.lock();
                // A failure of another sort ends the outage before it.
                let begins =
                    outage.as_ref().is_none_or(|(_, before)| before.replicas() != failure.replicas());
                if begins {
                    *outage = Some((Moment::now(), failure.clone()));
                }
                self.is_failing.store(true, Ordering::Relaxed);
                drop(outage);
                begins.then(|| -> Report {
                    let ((server, holds), _error) = (described(), failure.clone());
                    let observer = Arc::clone(&self.observer);
                    Box::new(move || {
                        event!(warn, server = %server, holds = holds, error = %_error, "a server fails: its leases expire unless it answers again");
                        measure::outage(&server);
                        observer.emit(|| Event::OutageBegan { server, holds });
                    })
                })
            }
            None if self.is_failing.load(Ordering::Relaxed) => {
                let mut outage = self.outage.lock();
                let ended = outage.take();
                // Under the lock: another outage, which begins at this moment, would go unnoticed.
                self.is_failing.store(false, Ordering::Relaxed);
                drop(outage);
                let ((server, _holds), after) = (described(), Moment::now().since(ended?.0));
                let observer = Arc::clone(&self.observer);
                Some(Box::new(move || {
                    event!(info, server = %server, holds = _holds, after = ?after, "a server answers again");
                    measure::outage_ended(&server);
                    observer.emit(|| Event::OutageEnded { server, after });
                }))
            }
            None => None,
        }
    }
}

impl Drop for OutageRecord {
    fn drop(&mut self) {
        if self.is_failing.load(Ordering::Relaxed) {
            measure::outage_ended(&self.label); // for this client
        }
    }
}
