//! [`release_after`]: work under locks that are held. [`Lease::check`]: for work that cannot be
//! dropped, step by step.

use super::lease::Lease;
use crate::error::{Error, Operation};
use crate::fencing::FencingToken;
use crate::traces::event;

/// Awaits work that ends with its leases, and then the release, whatever the outcome.
///
/// # Cancel safety
/// Cancel safe: dropping it drops `work`, and the locks are released in the background.
pub(crate) async fn release_after<T, E: From<Error>>(
    work: impl Future<Output = Result<Result<T, E>, Error>>,
    release: impl Future<Output = Result<(), Error>>,
) -> Result<T, E> {
    let outcome = work.await;
    let released = release.await;
    // The release of a lost lease says the same as the loss.
    conclude(outcome?, released)
}

/// The outcome of work that ended by itself, and of the release that followed.
pub(crate) fn conclude<T, E: From<Error>>(
    outcome: Result<T, E>,
    released: Result<(), Error>,
) -> Result<T, E> {
    match (outcome, released) {
        (Ok(value), Ok(())) => Ok(value),
        // The work was done under a valid lease, and the keeper goes on with the release. A caller
        // that got this error would do the work again.
        (Ok(value), Err(_release)) if _release.is_transient() => {
            event!(warn, error = %_release, "the work is done; its lock is released in the background");
            Ok(value)
        }
        (Ok(_done), Err(release)) => Err(release.into()),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(_release)) => {
            event!(warn, error = %_release, "the work failed, and so did the release");
            Err(error)
        }
    }
}

impl Lease {
    /// Returns the [fencing token](Lease::fencing_token) while the lease is valid: the check before
    /// each step of work that cannot be dropped, such as code that blocks. It sends no request.
    ///
    /// ```no_run
    /// # fn write(part: u64, token: Option<redlatch::FencingToken>) {}
    /// # fn run(lease: redlatch::Lease) -> Result<(), redlatch::Error> {
    /// for part in 0..100 {
    ///     write(part, lease.check()?);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// **What it does not**: promise that the lease is still valid when the step ends. The resource
    /// compares the token.
    ///
    /// # Errors
    /// - Those of [`while_held`](Lease::while_held).
    pub fn check(&self) -> Result<Option<FencingToken>, Error> {
        self.end().map_or(Ok(self.fencing_token()), |end| Err(self.error(Operation::Hold, end)))
    }
}
