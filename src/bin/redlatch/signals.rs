//! [`Signals`]: the signals that `run` forwards.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// The signals that end a wait, and that a command receives from `run`.
const FORWARDED: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// What happened to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It received a signal to forward.
    Forward(Signal),
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
        let forwarded = FORWARDED.into_iter().filter(|signal| !is_in(ignored, *signal));
        let forwarded = forwarded.map(|signal| (Event::Forward(signal), signal));
        let others = [(Event::Continued, Signal::CONT), (Event::Child, Signal::CHILD)];
        for (event, signal) in forwarded.chain(others) {
            streams.push((event, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
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

    /// Waits for a signal to forward.
    pub(crate) async fn forwarded(&mut self) -> Signal {
        loop {
            if let Event::Forward(signal) = self.next().await {
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

fn is_in(mask: u64, signal: Signal) -> bool {
    let bit = u32::try_from(signal.as_raw() - 1).ok().and_then(|bit| 1_u64.checked_shl(bit));
    bit.is_some_and(|bit| mask & bit != 0)
}
