//! [`OutageRecord`]: since when a node has failed, and what is said of it: once when it begins, and
//! once when it ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::runtime::Handle;
use tokio::sync::Mutex;

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
    reports: Arc<Reports>,
    /// The number of locks that the client holds.
    holds: Arc<AtomicUsize>,
    observer: Arc<Observer>,
    runtime: Handle,
}

/// What is still to be said, in the order in which it happened. A task of its own says it: a
/// subscriber that blocks keeps no request waiting.
#[derive(Default)]
struct Reports {
    queued: Guarded<VecDeque<Report>>,
    /// Held by the task that says it.
    saying: Mutex<()>,
}

impl Reports {
    async fn say(&self) {
        let _in_order = self.saying.lock().await;
        let next = || self.queued.lock().pop_front();
        while let Some(report) = next() {
            report();
        }
    }
}

impl OutageRecord {
    /// Must be called on the client's runtime.
    pub(super) fn new(label: &Arc<str>, holds: &Arc<AtomicUsize>, observer: &Arc<Observer>) -> OutageRecord {
        OutageRecord {
            outage: Guarded::default(),
            is_failing: AtomicBool::new(false),
            label: Arc::clone(label),
            reports: Arc::default(),
            holds: Arc::clone(holds),
            observer: Arc::clone(observer),
            runtime: Handle::current(),
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

    /// Records the outcome of requests. An outage that begins or ends is reported.
    pub(super) fn note(&self, failure: Option<&Failure>) {
        // A password that is wrong by now ends no outage, nor does it begin one.
        if failure.is_some_and(|failure| failure.is_no_reply() && !failure.is_transient()) {
            return;
        }
        if self.change(failure.filter(|failure| failure.is_transient())) {
            let reports = Arc::clone(&self.reports);
            self.runtime.spawn(async move { reports.say().await });
        }
    }

    /// Records an outage that begins or ends. Whether there is something to report.
    fn change(&self, failure: Option<&Failure>) -> bool {
        if failure.is_none() && !self.is_failing.load(Ordering::Relaxed) {
            return false;
        }
        let mut outage = self.outage.lock();
        let (server, observer) = (Arc::clone(&self.label), Arc::clone(&self.observer));
        let report: Report = match failure {
            Some(failure) => {
                // A failure of another sort begins anew, but counts as the same outage.
                let before = outage.as_ref().map(|(_, before)| before.replicas());
                if before == Some(failure.replicas()) {
                    return false;
                }
                *outage = Some((Moment::now(), failure.clone()));
                let (holds, _error) = (self.holds.load(Ordering::Relaxed), failure.clone());
                Box::new(move || {
                    event!(warn, server = %server, holds = holds, error = %_error, "a server fails: its leases expire unless it answers again");
                    if before.is_none() {
                        measure::outage(&server);
                    }
                    observer.emit(|| Event::OutageBegan { server, holds });
                })
            }
            None => {
                let Some((since, _)) = outage.take() else { return false };
                let (_holds, after) = (self.holds.load(Ordering::Relaxed), Moment::now().since(since));
                Box::new(move || {
                    event!(info, server = %server, holds = _holds, after = ?after, "a server answers again");
                    measure::outage_ended(&server);
                    observer.emit(|| Event::OutageEnded { server, after });
                })
            }
        };
        self.is_failing.store(failure.is_some(), Ordering::Relaxed);
        self.reports.queued.lock().push_back(report); // under the lock: in the order of the changes
        true
    }
}

impl Drop for OutageRecord {
    fn drop(&mut self) {
        if self.is_failing.load(Ordering::Relaxed) {
            measure::outage_ended(&self.label); // for this client
        }
    }
}
