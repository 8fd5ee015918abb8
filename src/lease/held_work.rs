//! [`run`]: work under a lock that is held.

use super::lease::Lease;
use crate::error::Error;
use crate::traces::event;

/// Runs `work` while the lease is valid, and releases it whatever the outcome.
///
/// # Cancel safety
/// Cancel safe: dropping it drops `work`, and the lock is released in the background.
pub(crate) async fn run<T, E: From<Error>>(
    lease: Lease,
    release: impl Future<Output = Result<(), Error>>,
    work: impl AsyncFnOnce(Lease) -> Result<T, E>,
) -> Result<T, E> {
    let outcome = lease.while_held(work(lease.clone())).await;
    let released = release.await;
    match outcome {
        Ok(Ok(value)) => released.map(|()| value).map_err(E::from),
        Ok(Err(error)) => {
            if let Err(_release) = released {
                event!(warn, lock = %lease.name(), error = %_release, "the work failed, and so did the release");
            }
            Err(error)
        }
        // The release of a lost lease says the same.
        Err(ended) => Err(E::from(ended)),
    }
}
