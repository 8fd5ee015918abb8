//! What is said of a lease once it has ended: to the tasks that wait for that, in errors, in the
//! log, and to the metrics.

use std::sync::atomic::Ordering;

use super::lease::Lease;
use super::lease_end::LeaseEnd;
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::events::{Event, LossReason};
use crate::measure;
use crate::options::Renewal;
use crate::traces::{Report, event};

impl Lease {
    /// Wakes the tasks that wait for its end. The returned report logs a loss, once per lease; that
    /// of a hold stands for all its members.
    pub(super) fn announce(&self) -> Option<Report> {
        self.0.noted.notify.notify_waiters();
        let end = self.end().filter(|end| end.is_loss() && self.0.of_hold.is_none())?;
        let reason = self.loss_reason()?;
        let is_first = !self.0.noted.is_reported.swap(true, Ordering::Relaxed);
        let lease = self.clone();
        is_first.then(|| -> Report {
            Box::new(move || {
                let (name, kind) = (lease.name(), lease.kind().name);
                event!(
                    error,
                    lock = %name,
                    holder = lease.attempt().holder(),
                    token = lease.fencing_token().map(|token| token.get()),
                    server = lease.attempt().origin.server.as_deref(),
                    reason = reason.text(),
                    "lost a lease: another client may hold the lock"
                );
                measure::lost(kind, reason);
                lease.measure_end(end);
                lease.attempt().origin.observer.emit(|| Event::Lost { lock: name.clone(), kind, reason });
            })
        })
    }

    /// Why it was lost, if it was. That of a hold stands for all its members.
    fn loss_reason(&self) -> Option<LossReason> {
        let hold = self.0.of_hold.as_ref().unwrap_or(self);
        let end = hold.end().filter(|end| end.is_loss())?;
        let found = || match end {
            LeaseEnd::Revoked => LossReason::Revoked,
            _ if hold.options().renewal == Renewal::Never => LossReason::Expired,
            _ if hold.longest_until().is_some_and(|longest| longest <= Moment::now()) => LossReason::MaxHold,
            _ if !hold.0.noted.is_renewing.load(Ordering::Relaxed) => LossReason::Stalled,
            _ => LossReason::NotRenewed,
        };
        Some(*hold.0.noted.loss_reason.get_or_init(found))
    }

    /// The error of an operation on this lease, if it has ended.
    pub(crate) fn ended(&self, operation: Operation) -> Option<Error> {
        self.end().map(|end| self.error(operation, end))
    }

    /// The error of an operation on a lease that ended.
    pub(super) fn error(&self, operation: Operation, end: LeaseEnd) -> Error {
        let context = self.context(operation);
        match end {
            LeaseEnd::Lost | LeaseEnd::Revoked => self.lost_error(context),
            LeaseEnd::Released | LeaseEnd::Leaked => Error::Released { context },
            LeaseEnd::Closed => Error::Closed { context },
        }
    }

    /// The error of a call that finds it lost.
    pub(super) fn lost_error(&self, context: Context) -> Error {
        Error::Lost { context, reason: self.loss_reason() }
    }

    /// Records for how long it was held. Once: a lease that was lost is forgotten later as well.
    pub(super) fn measure_end(&self, end: LeaseEnd) {
        let is_shared = self.0.noted.is_shared.load(Ordering::Relaxed);
        if measure::ON && !is_shared && !self.0.noted.is_measured.swap(true, Ordering::Relaxed) {
            let held = Moment::now().since(self.0.counts_from);
            measure::held(self.kind().name, end.word(), held);
        }
    }
}
