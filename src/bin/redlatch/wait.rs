//! The wait of `run` for its lock: [`WaitArgs`], and what ends it.

use std::time::{Duration, Instant};

use redlatch::{Locks, Owner};
use rustix::process::Signal;

use crate::exit::{Failure, say};
use crate::lock_args::{Guard, LockArgs};
use crate::proc;
use crate::signals::{Event, Signals};
use crate::view::View;

/// How long a wait lasts before a message says so, and how often to look for the holder.
const REPORT_AFTER: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub(crate) struct WaitArgs {
    /// Say on stderr who holds the lock, if this has to wait for it.
    #[arg(short, long)]
    verbose: bool,
}

impl WaitArgs {
    /// Acquires the lock within its limit, counted from `start`; `None` if another holder has it.
    pub(crate) async fn acquire(
        &self,
        lock: &LockArgs,
        locks: &Locks,
        name: &str,
        owner: &Owner,
        start: Instant,
    ) -> Result<Option<Guard>, Failure> {
        let mut acquire = std::pin::pin!(lock.acquire(locks, name, owner, start));
        tokio::select! {
            biased;
            acquired = &mut acquire => return acquired,
            // Beside it: a server that does not say who holds the lock may grant it.
            () = report(locks, name), if self.verbose => {}
        }
        acquire.await
    }
}

/// Says once who holds the lock.
async fn report(locks: &Locks, name: &str) {
    loop {
        tokio::time::sleep(REPORT_AFTER).await;
        match View::of(locks, name).await {
            // Released just now: this waiter or another one gets it.
            Ok(view) if !view.is_held() => {}
            Ok(view) => return say(&view.obstacle()),
            Err(failure) => return say(&format!("lock {name:?}: waits: {}", failure.text())),
        }
    }
}

/// Waits for a signal that ends the wait for the lock. Meanwhile this may be the first process of a
/// container, which has to reap all orphans.
pub(crate) async fn interruption(signals: &mut Signals) -> Signal {
    loop {
        // Nothing else waits for a child yet.
        proc::reap(&[]);
        if let Event::Forward(signal) | Event::Pass(signal) = signals.next().await {
            return signal;
        }
    }
}
