//! [`Signals`]: the signals that `run` forwards.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// The signals that end a wait, and that a command receives from `run`.
const FORWARDED: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Signals that mean what the command likes: it receives them too, and goes on or ends by itself.
const PASSED: [Signal; 2] = [Signal::USR1, Signal::USR2];

/// The first signal without a name that a program may use, on Linux.
const FIRST_UNNAMED: i32 = 34;

/// Signals that would end this process, with the lock held until its TTL. The command gets TERM.
fn ending() -> Vec<i32> {
    let named = [Signal::ALARM, Signal::VTALARM, Signal::PROF, Signal::XCPU];
    let mut ending: Vec<i32> = named.iter().map(|signal| signal.as_raw()).collect();
    #[cfg(target_os = "linux")]
    ending.extend([Signal::IO, Signal::POWER, Signal::STKFLT].iter().map(|signal| signal.as_raw()));
    #[cfg(target_os = "linux")]
    ending.extend(FIRST_UNNAMED..=64);
    ending
}

/// What happened to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It received a signal to forward.
    Forward(Signal),
    /// It received a signal to pass on that does not end a command which expects it.
    Pass(Signal),
    /// It was stopped, and continues.
    Continued,
    /// A child has ended or stopped.
    Child,
}

/// The signals of this process, from the moment this was made. A second signal of a kind before the
/// first one is read is merged with it, as the kernel does.
pub(crate) struct Signals(Vec<(Event, unix::Signal)>);

impl Signals {
    pub(crate) fn new() -> io::Result<Signals> {
        let ignored = ignored_mask();
        let mut streams = Vec::new();
        let forwarded = FORWARDED.map(|signal| (Event::Forward(signal), signal.as_raw()));
        let passed = PASSED.map(|signal| (Event::Pass(signal), signal.as_raw()));
        let ending = ending().into_iter().map(|signal| (Event::Forward(Signal::TERM), signal));
        let received = forwarded.into_iter().chain(passed).chain(ending);
        let received = received.filter(|(_, signal)| !is_in(ignored, *signal));
        let others = [(Event::Continued, Signal::CONT.as_raw()), (Event::Child, Signal::CHILD.as_raw())];
        for (event, signal) in received.chain(others) {
            match unix::signal(SignalKind::from_raw(signal)) {
                Ok(stream) => streams.push((event, stream)),
                // The C library may keep it for itself, as musl does the first one without a name.
                Err(_) if signal >= FIRST_UNNAMED => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Signals(streams))
    }

    /// # Cancel safety
    /// Cancel safe: an event stays until it is returned.
    pub(crate) async fn next(&mut self) -> Event {
        poll_fn(|context| {
            for (event, stream) in &mut self.0 {
                if stream.poll_recv(context) == Poll::Ready(Some(())) {
                    return Poll::Ready(*event);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for a signal to forward or to pass on.
    pub(crate) async fn forwarded(&mut self) -> Signal {
        loop {
            if let Event::Forward(signal) | Event::Pass(signal) = self.next().await {
                return signal;
            }
        }
    }
}

/// The signals that this process ignores, as a mask. A signal that the caller ignores, as `nohup`
/// does HUP and a shell INT for its background jobs, must stay ignored: a handler would replace
/// that, also for the command.
fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn is_in(mask: u64, signal: i32) -> bool {
    let bit = u32::try_from(signal - 1).ok().and_then(|bit| 1_u64.checked_shl(bit));
    bit.is_some_and(|bit| mask & bit != 0)
}
