//! [`run`]: work under a lock that is held. [`release_after`]: under several.

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
    release_after(lease.while_held(work(lease.clone())), release).await
}

/// Awaits work that ends with its leases, and then the release, whatever the outcome.
///
/// # Cancel safety
/// Cancel safe: as [`run`].
pub(crate) async fn release_after<T, E: From<Error>>(
    work: impl Future<Output = Result<Result<T, E>, Error>>,
    release: impl Future<Output = Result<(), Error>>,
) -> Result<T, E> {
    let outcome = work.await;
    let released = release.await;
    match outcome {
        Ok(Ok(value)) => released.map(|()| value).map_err(E::from),
        Ok(Err(error)) => {
            if let Err(_release) = released {
                event!(warn, error = %_release, "the work failed, and so did the release");
            }
            Err(error)
        }
        // The release of a lost lease says the same.
        Err(ended) => Err(E::from(ended)),
    }
}
