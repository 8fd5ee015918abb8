//! [`Locks::elect`]: one leader among processes, for as long as its work lasts.

use std::pin::pin;
use std::time::Duration;

use tokio::time::sleep;

use super::Locks;
use crate::error::Error;
use crate::lease::{Lease, conclude};

/// The longest of the first pauses between two tries, and of all. Each is twice the one before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

impl Locks {
    /// Competes for the mutex of this name, and runs `work` while this task is the leader, which is
    /// while it holds that mutex. If the lease is lost, it drops the work and competes again.
    ///
    /// The work is called for each term. An async closure may read what it captures, but not change
    /// it.
    ///
    /// The call ends when the work does: with its value, or with its error. It outlasts lost
    /// leases, and outages of any length unless [`outage_limit`](crate::Options::outage_limit) is
    /// set.
    ///
    /// To end it from outside, drop the future, wherever it is: the work must bear that anyway,
    /// since a lost lease drops it too. Then [`close`](Locks::close) the client, or await
    /// [`settled`](Locks::settled), so that the release is done before the program ends.
    ///
    /// **What it promises**: the leases of two leaders are never both [valid](Lease::is_lost).
    /// Candidates lead in the order in which they came. The next one takes over at once if the
    /// leader's work ends, and within its TTL if it is killed.
    ///
    /// **What it does not**: stop a leader at once. The work is dropped at its next await after the
    /// lease ended, so the end of one term and the beginning of the next may overlap. Send the
    /// [fencing token](Lease::fencing_token) with each write: that of the next term is larger.
    ///
    /// A leader leads until its work ends. With [`max_hold`](crate::Options::max_hold), it steps
    /// down after that time, and competes again behind the candidates that wait.
    ///
    /// ```no_run
    /// # async fn stopped() {}
    /// # async fn lead(token: Option<redlatch::FencingToken>) {}
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// use redlatch::{Error, Lease};
    /// let election = locks.elect("scheduler", async |lease: Lease| loop {
    ///     lead(lease.fencing_token()).await; // one step; handle its errors here
    /// });
    /// tokio::select! {
    ///     outcome = election => outcome,
    ///     () = stopped() => locks.close(std::time::Duration::from_secs(5)).await, // resigns
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// - That of the work; a failed release is then only logged.
    /// - [`Error::Name`]: the name is refused; no request is sent.
    /// - Those of [`Mutex::lock`](crate::Mutex::lock) that are not
    ///   [transient](Error::is_transient). With `outage_limit`, also those that it returns after
    ///   that limit.
    /// - [`Error::Closed`]: the client was closed.
    /// - Those of [`MutexGuard::release`](crate::MutexGuard::release): the work is done, and its
    ///   value is dropped.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, leaves the queue, and the lock is released in
    /// the background.
    pub async fn elect<T, E: From<Error>, F: Future<Output = Result<T, E>>>(
        &self,
        name: impl AsRef<str>,
        // Not `AsyncFnMut`: rustc cannot prove that a call with one may be spawned.
        mut work: impl FnMut(Lease) -> F,
    ) -> Result<T, E> {
        let mutex = self.mutex(name)?;
        let mut pause = PAUSES.0;
        loop {
            let error = match mutex.lock().await {
                Ok(guard) => {
                    pause = PAUSES.0;
                    let lease = guard.lease();
                    match lease.while_held(work(lease.clone())).await {
                        Ok(outcome) => return conclude(outcome, guard.release().await),
                        // Dropped, not released: while no server replies, a release takes long.
                        Err(ended) => ended,
                    }
                }
                Err(error) => error,
            };
            // With an outage limit, `lock` has outlasted what it may by the time it fails.
            let is_lost = matches!(error, Error::Lost { .. });
            if !is_lost && (self.options.outage_limit.is_some() || !error.is_transient()) {
                return Err(error.into());
            }
            // At random: all candidates notice an outage, and its end, at the same time.
            let random = f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 256.0;
            let rest = pause.mul_f64(0.5 + random / 2.0);
            // `None`: the client's runtime has ended, as the next try finds out.
            let _rested = self.client.with_runtime(pin!(async { sleep(rest).await })).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    }
}
