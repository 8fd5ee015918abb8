//! `redlatch run`: runs a command under a lock, with the manners of flock(1).

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use redlatch::{Error, Locks, LocksBuilder, Owner};

use crate::cgroup::Cgroup;
use crate::deadline::{Grace, Limits};
use crate::exit::{Exit, Failure, LOST, say};
use crate::gate;
use crate::lock_args::{Guard, LockArgs};
use crate::messages;
use crate::servers::{ServerArgs, variable};
use crate::signals::Signals;
use crate::supervise;
use crate::wait::{self, WaitArgs};

const OWNER: &str = "REDLATCH_OWNER";

/// How long the end of an interrupted run waits for a release, and for the server to confirm that
/// nothing is left.
const CLOSE: Duration = Duration::from_secs(1);

const CODES: &str = "\
Exit codes:
  the command's own, or 128 and the number of the signal that ended it
  1    the lock is held, with -n or after -w; -E sets another code
  64   the arguments are invalid, or two servers that were named are one
  69   the server cannot be reached, does not reply, or refuses for what may pass by itself; or
       the lock has too many holds, or another reader already waits to write
  71   the system refused a process, a pipe or a signal
  75   the lock was lost before the command ended, or --max-hold was reached
  77   the server refuses the password, a right, a certificate or the database, is not what it was
       said to be, or has a lock of another kind
  126  the command cannot be executed
  127  the command was not found
  128+ a signal ended the wait; the command was not started

The command receives REDLATCH_NAME, REDLATCH_TOKEN (the fencing token), REDLATCH_OWNER and
REDLATCH_RUNS.";

/// Run a command while holding a lock.
///
/// Waits for the lock, runs the command with this stdin, stdout and stderr, and releases the lock
/// when the command ends. The lease is renewed until then. If it cannot be renewed, the command's
/// processes get TERM, and KILL before the lease ends.
#[derive(clap::Args)]
#[command(after_help = CODES)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    lock: LockArgs,
    #[command(flatten)]
    wait: WaitArgs,
    /// The exit code if the lock is held, with -n or after -w.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    conflict_exit_code: u8,
    /// How long the lock stays held if this machine dies, 100ms to 24h; renewed after each third.
    #[arg(long, value_name = "DURATION", default_value = "30s", allow_hyphen_values = true, value_parser = crate::span::parse)]
    ttl: Duration,
    /// How long the command may hold the lock: then it gets TERM, and KILL, as if the lock were
    /// lost. At least the TTL; without it there is no limit.
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = crate::span::parse)]
    max_hold: Option<Duration>,
    /// How long the lock stays held from when it was acquired, although the command has ended; at
    /// most 24h.
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = crate::span::parse)]
    hold_at_least: Duration,
    /// How long before the end of a lease that cannot be renewed the command gets TERM. By default
    /// 5s, or a third of the TTL if that is shorter.
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = crate::span::parse)]
    grace: Option<Duration>,
    /// Identifies the holder for `inspect` and `watch`, without -r; HOST.PID by default. ASCII
    /// letters, digits, `-`, `_` and `.`
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// A process that has left the command's group and cleared REDLATCH_RUNS is none of the
    /// command's: a daemon, which outlives a lost lock.
    #[arg(long)]
    allow_daemons: bool,
    /// The name of the lock.
    name: String,
    /// The command and its arguments. The first word after NAME that is no option begins it.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

impl RunArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<Exit, Failure> {
        let start = Instant::now();
        if self.command.first().is_some_and(|word| word == "--") {
            let text = "`--` may stand once, between the name of the lock and the command";
            return Err(Failure::Usage(text.to_owned()));
        }
        if self.name.starts_with('-') {
            return Err(Failure::Usage(format!("no lock has the name {}{}", self.name, gate::OPTION_TIP)));
        }
        if !self.hold_at_least.is_zero() && self.lock.is_reentrant() && wait::is_inside(&self.name) {
            say(
                "--hold-at-least has no effect here if the outer `redlatch run` ends last: its release decides",
            );
        }
        let grace = Grace::new(self.ttl, self.grace)?;
        let owner = owner()?;
        let label = self.label.clone().unwrap_or_else(label);
        let options = servers.options().ttl(self.ttl).hold_at_least(self.hold_at_least);
        let mut options = self.wait.options(options);
        if let Some(longest) = self.max_hold {
            options = options.max_hold(longest);
        }
        let builder = servers.builder()?.options(options).label(label);
        // From here on, a signal does not end this process.
        let mut signals = Signals::new().map_err(Failure::os("handle signals"))?;
        messages::start().map_err(Failure::os("start a thread"))?;
        let exit = self.lock_and_hold(builder, &owner, grace, start, &mut signals).await;
        let exit = exit.unwrap_or_else(|failure| {
            say(&failure.text());
            Exit::Code(failure.code())
        });
        messages::written(&mut signals, matches!(exit, Exit::Interrupted(_))).await;
        Ok(exit)
    }

    /// Acquires the lock, and runs the command under it.
    async fn lock_and_hold(
        &self,
        builder: LocksBuilder,
        owner: &Owner,
        grace: Grace,
        start: Instant,
        signals: &mut Signals,
    ) -> Result<Exit, Failure> {
        if let Some(name) = self.command.first()
            && let Err(error) = gate::find(name)
        {
            let is_command = gate::find(self.name.as_ref()).is_ok() || Path::new(&self.name).is_file();
            return Ok(Exit::Code(gate::refuse(name, &error, is_command.then_some(&self.name))));
        }
        let locks = tokio::select! {
            biased;
            signal = wait::interruption(signals) => return Ok(Exit::Interrupted(signal)),
            connected = self.wait.connect(builder) => match connected {
                Ok(locks) => locks,
                Err(failure) => return Ok(self.give_up(&failure)),
            },
        };
        let acquired = tokio::select! {
            biased;
            signal = wait::interruption(signals) => Err(Exit::Interrupted(signal)),
            acquired = self.wait.acquire(&self.lock, &locks, &self.name, owner, start) => match acquired {
                Ok(guard) => Ok(guard),
                Err(failure) => return Ok(self.give_up(&failure)),
            },
        };
        let mut patience = CLOSE;
        let exit = match acquired {
            Ok(Some(guard)) => {
                let mut cgroup = None;
                let exit = self.hold(guard, owner, grace, signals, &mut patience, &mut cgroup).await;
                // After the release, so that the next holder does not wait for it.
                cgroup.inspect(Cgroup::remove);
                exit
            }
            Ok(None) => tokio::select! {
                biased;
                // The server may be silent.
                signal = wait::interruption(signals) => Ok(Exit::Interrupted(signal)),
                () = self.wait.report_conflict(&self.lock, &locks, &self.name) => Ok(Exit::Code(self.conflict_exit_code)),
            },
            Err(exit) => Ok(exit),
        };
        tokio::select! {
            biased;
            () = close(&locks, patience) => {}
            _ = signals.forwarded() => close(&locks, CLOSE).await,
        }
        exit
    }

    /// Says why nothing is started: messages of several jobs may arrive in one mailbox.
    fn give_up(&self, failure: &Failure) -> Exit {
        say(&format!("{}; lock {:?}: nothing is started", failure.text(), self.name));
        Exit::Code(failure.code())
    }

    /// Runs the command under the guard, and releases it. If that fails, `patience` is how long it
    /// is to be repeated.
    async fn hold(
        &self,
        guard: Guard,
        owner: &Owner,
        grace: Grace,
        signals: &mut Signals,
        patience: &mut Duration,
        cgroup: &mut Option<Cgroup>,
    ) -> Result<Exit, Failure> {
        let lease = guard.lease();
        let token = lease.fencing_token().map(|token| token.to_string()).unwrap_or_default();
        let variables =
            [("REDLATCH_NAME", self.name.clone()), ("REDLATCH_TOKEN", token), (OWNER, owner.to_string())];
        let limits = Limits { grace, max_hold: self.max_hold, allows_daemons: self.allow_daemons };
        let ended = supervise::run(&self.command, &variables, lease, limits, signals, cgroup).await;
        let Some(exit) = ended.transpose() else {
            // Released in the background, if a server answers: the lease ends soon anyway.
            drop(guard);
            return Ok(Exit::Code(LOST));
        };
        // It is the release that keeps the lock held: without it, the lease ends before that.
        let left = if self.hold_at_least.is_zero() { Duration::ZERO } else { self.ttl };
        let mut release = std::pin::pin!(guard.release());
        let released = tokio::select! {
            biased;
            released = &mut release => released,
            // The server may be silent. `close` says so if the release is not confirmed either.
            _ = signals.forwarded() => match tokio::time::timeout(CLOSE, release).await {
                Ok(released) => released,
                Err(_) => return exit,
            },
        };
        match released {
            Ok(()) => exit,
            Err(error @ (Error::Lost { .. } | Error::NotHeld { .. })) => {
                say(&Failure::from(error).text());
                let name = &self.name;
                say(&format!("lock {name:?}: lost before the command ended: another holder may have had it"));
                exit.map(|_| Exit::Code(LOST))
            }
            Err(error) => {
                *patience = CLOSE.max(left);
                // The command has succeeded or failed by itself, and its exit code says which.
                say(&Failure::from(error).text());
                exit
            }
        }
    }
}

/// Waits until the servers know that nothing is held or queued.
async fn close(locks: &Locks, limit: Duration) {
    if let Err(error) = locks.close(limit).await {
        say(&Failure::from(error).text());
    }
}

/// The owner of the calling `redlatch run`, or a new one. It is passed on by every kind of lock, so
/// that a call chain through other locks can re-enter.
fn owner() -> Result<Owner, Failure> {
    match variable(OWNER)? {
        Some(word) => word.parse().map_err(|error| Failure::Usage(format!("{OWNER}: {error}"))),
        None => Ok(Owner::new()),
    }
}

fn label() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let host: String =
        host.chars().map(|letter| if is_allowed(letter) { letter } else { '-' }).take(40).collect();
    format!("{host}.{}", std::process::id())
}
