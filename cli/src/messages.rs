//! Messages of `run` on stderr, written by a thread of their own.
//!
//! stderr may block for as long as its reader likes, as with `2>&1 | less`. Meanwhile the command
//! would run on without a lease, or the lock stay held after the command: so no message is written
//! by the thread that supervises the command.

use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::process::getpgrp;
use rustix::termios::{LocalModes, tcgetattr, tcgetpgrp};
use tokio::sync::oneshot;

use crate::signals::Signals;

/// How often to look whether a terminal takes output again.
const POLL: Duration = Duration::from_millis(100);

/// How long messages still have once a signal ends the wait for their reader.
const LAST_CHANCE: Duration = Duration::from_millis(200);

static QUEUE: OnceLock<Sender<Item>> = OnceLock::new();

/// The command has ended and the lock is released, so this program may block and be stopped.
static IS_LAST: AtomicBool = AtomicBool::new(false);

enum Item {
    Line(String),
    /// All lines before it are written.
    End(oneshot::Sender<()>),
}

/// Starts the thread. Until then, messages are written at once.
pub(crate) fn start() -> io::Result<()> {
    let (queue, items) = channel();
    thread::Builder::new().name("messages".to_owned()).spawn(move || write_all(&items))?;
    QUEUE.get_or_init(|| queue);
    Ok(())
}

/// Writes a line to stderr, or gives it to the thread. A closed stderr is no reason to end.
pub(crate) fn write(line: String) {
    match QUEUE.get() {
        // The thread ends with the process.
        Some(queue) => drop(queue.send(Item::Line(line))),
        None => drop(io::stderr().write_all(line.as_bytes())),
    }
}

/// Waits until all messages are written. A signal ends the wait, or has ended it before.
pub(crate) async fn written(signals: &mut Signals, is_interrupted: bool) {
    IS_LAST.store(true, Ordering::Relaxed);
    let (sender, mut end) = oneshot::channel();
    if let Some(queue) = QUEUE.get()
        && queue.send(Item::End(sender)).is_ok()
    {
        tokio::select! {
            _ = &mut end => {}
            // It may have come long ago, while the server was silent.
            () = async { if !is_interrupted { signals.forwarded().await; } } => {
                let _ = tokio::time::timeout(LAST_CHANCE, end).await;
            }
        }
    }
}

fn write_all(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Line(line) => {
                while would_stop() && !IS_LAST.load(Ordering::Relaxed) {
                    thread::sleep(POLL);
                }
                let _ = io::stderr().write_all(line.as_bytes());
            }
            Item::End(sender) => drop(sender.send(())),
        }
    }
}

/// Whether writing would stop this whole process: stderr is a terminal with `tostop`, and another
/// group is in its foreground.
fn would_stop() -> bool {
    let stderr = io::stderr();
    tcgetattr(&stderr).is_ok_and(|terminal| terminal.local_modes.contains(LocalModes::TOSTOP))
        && tcgetpgrp(&stderr).is_ok_and(|group| group != getpgrp())
}
