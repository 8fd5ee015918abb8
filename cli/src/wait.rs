//! The wait of `run` for its lock: [`WaitArgs`], and what ends it.

use std::env;
use std::time::{Duration, Instant};

use redlatch::{Locks, LocksBuilder, Options, Owner};
use rustix::process::Signal;

use crate::exit::{Failure, say};
use crate::lock_args::{Guard, LockArgs};
use crate::proc;
use crate::signals::{Event, Signals};
use crate::view::View;

/// How long a wait lasts before a message says so, and how often to look for the holder.
const REPORT_AFTER: Duration = Duration::from_millis(200);

/// How long to pause between tries while the servers fail.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub(crate) struct WaitArgs {
    /// Say on stderr who holds the lock, or why the servers fail, if this has to wait or gives up.
    #[arg(short, long)]
    verbose: bool,
    /// How long the servers may fail before this gives up, up to 24h. By default it does so at once
    /// if it cannot connect, and within seconds while it waits.
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = crate::span::parse)]
    outage_limit: Option<Duration>,
}

impl WaitArgs {
    pub(crate) fn options(&self, options: Options) -> Options {
        match self.outage_limit {
            Some(limit) => options.outage_limit(limit),
            None => options,
        }
    }

    pub(crate) async fn connect(&self, builder: LocksBuilder) -> Result<Locks, Failure> {
        match self.outage_limit {
            Some(_) => Ok(builder.connect_lazily()?),
            None => Ok(builder.connect().await?),
        }
    }

    /// Says why the command is not started, if that was asked for: another holder has the lock.
    pub(crate) async fn report_conflict(&self, lock: &LockArgs, locks: &Locks, name: &str) {
        let tip = nesting_tip(lock, name);
        if self.verbose || tip.is_some() {
            let text = match View::of(locks, name).await {
                Ok(view) if view.is_held() => view.conflict(),
                _ => format!("lock {name:?}: was held by another client: nothing is started"),
            };
            say(&(text + tip.unwrap_or_default()));
        }
    }

    /// Acquires the lock within its limit, counted from `start`; `None` if another holder has it.
    pub(crate) async fn acquire(
        &self,
        lock: &LockArgs,
        locks: &Locks,
        name: &str,
        owner: &Owner,
        start: Instant,
    ) -> Result<Option<Guard>, Failure> {
        let left = || self.outage_limit.map(|limit| limit.saturating_sub(start.elapsed()));
        let tip = nesting_tip(lock, name);
        let mut acquiring = std::pin::pin!(async {
            loop {
                match (lock.acquire(locks, name, owner, start).await, left()) {
                    // A single try ends with the first failure. What it may have acquired without
                    // an answer is released before the next one, to which it would be another
                    // holder's.
                    (Err(Failure::Lock(error)), Some(left))
                        if error.is_transient() && lock.tries_once() && !left.is_zero() =>
                    {
                        tokio::time::sleep(PAUSE.min(left)).await;
                        let _ = tokio::time::timeout(left, locks.settled()).await;
                    }
                    (outcome, _) => return outcome,
                }
            }
        });
        tokio::select! {
            biased;
            acquired = &mut acquiring => return acquired,
            // Beside it: a server that does not name the holder may grant the lock.
            () = report(locks, name, tip), if self.verbose || tip.is_some() => {}
        }
        acquiring.await
    }
}

/// A command that runs under a lock and starts `run` for the same one waits for itself: with -n,
/// its work is never done.
fn nesting_tip(lock: &LockArgs, name: &str) -> Option<&'static str> {
    (is_inside(name) && !lock.is_reentrant())
        .then_some("; if the `redlatch run` around this one has it, both need -r")
}

/// Whether a `redlatch run` around this one has a lock of this name.
pub(crate) fn is_inside(name: &str) -> bool {
    env::var_os("REDLATCH_NAME").is_some_and(|outer| outer == name)
}

/// Says once who holds the lock.
async fn report(locks: &Locks, name: &str, tip: Option<&str>) {
    loop {
        tokio::time::sleep(REPORT_AFTER).await;
        match View::of(locks, name).await {
            // Released just now: this waiter or another one gets it.
            Ok(view) if !view.is_held() => {}
            Ok(view) => return say(&(view.obstacle() + tip.unwrap_or_default())),
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
