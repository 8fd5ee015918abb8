//! [`Leases`]: those of several locks that are held together.

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use crate::error::Error;
use crate::lease::{Hold, Lease};

/// The leases of several locks that are held together. Clones share them.
#[derive(Clone, Debug)]
pub struct Leases(pub(super) Arc<[Lease]>);

impl Leases {
    pub(super) fn of(holds: &[Hold]) -> Leases {
        Leases(holds.iter().map(|hold| hold.lease().clone()).collect())
    }

    /// Returns the lease of the lock of this name; `None` if there is none.
    pub fn get(&self, name: &str) -> Option<&Lease> {
        self.iter().find(|lease| lease.name().as_str() == name)
    }

    /// Returns the leases, in the order in which the locks were acquired.
    pub fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.0.iter()
    }

    /// Returns whether one of the leases is [lost](Lease::is_lost), without a request.
    pub fn is_lost(&self) -> bool {
        self.iter().any(Lease::is_lost)
    }

    /// Runs `work` until one of the leases ends: then it drops `work` and returns the error of
    /// [`Lease::while_held`], which names the lock.
    ///
    /// # Errors
    /// - Those of [`Lease::while_held`].
    ///
    /// # Cancel safety
    /// Cancel safe: dropping it drops `work`.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let ending = self.iter().map(|lease| lease.while_held(pending::<()>()));
        let mut ending: Vec<Pin<Box<_>>> = ending.map(Box::pin).collect();
        let first_end = poll_fn(|context| {
            let ended = ending.iter_mut().find_map(|lease| match lease.as_mut().poll(context) {
                Poll::Ready(ended) => ended.err(),
                Poll::Pending => None,
            });
            ended.map_or(Poll::Pending, Poll::Ready)
        });
        let output = tokio::select! {
            biased;
            error = first_end => return Err(error),
            output = work => output,
        };
        self.check().map(|()| output)
    }

    /// Returns an error once one of the leases has ended, which names the lock: the check before
    /// each step of work that cannot be dropped. It sends no request. See [`Lease::check`].
    ///
    /// # Errors
    /// - Those of [`Lease::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.iter().try_for_each(|lease| lease.check().map(drop))
    }
}
