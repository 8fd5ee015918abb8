//! `redlatch watch`: a live view of a lock.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use redlatch::Locks;

use crate::exit::{Failure, print};
use crate::servers::ServerArgs;
use crate::view::View;

/// Watch the holders and the queue of a lock, until a signal.
///
/// On a terminal it redraws the lock. Otherwise it prints a line whenever a holder or the queue has
/// changed.
#[derive(clap::Args)]
pub(crate) struct WatchArgs {
    /// How often to ask the servers.
    #[arg(long, value_name = "DURATION", default_value = "500ms", allow_hyphen_values = true, value_parser = crate::span::parse)]
    interval: Duration,
    /// The name of the lock.
    name: String,
}

impl WatchArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        // No handlers: while a full pipe blocks this thread, they would keep the signals.
        let locks = servers.connect().await?;
        let draws = io::stdout().is_terminal();
        let mut screen = Screen::default();
        let mut last = None;
        loop {
            let view = self.ask(&locks).await?;
            match &view {
                Ok(view) if draws => screen.draw(&view.to_string())?,
                Ok(view) => {
                    if !matches!(&last, Some(Ok(last)) if view.is_same_as(last)) {
                        print(&view.summary())?;
                    }
                }
                Err(text) if draws => screen.draw(text)?,
                Err(text) => {
                    if !matches!(&last, Some(Err(last)) if last == text) {
                        print(text)?;
                    }
                }
            }
            last = Some(view);
            tokio::time::sleep(self.interval.max(Duration::from_millis(10))).await;
        }
    }

    /// The lock, or why the servers do not answer now.
    async fn ask(&self, locks: &Locks) -> Result<Result<View, String>, Failure> {
        match View::of(locks, &self.name).await {
            Ok(view) => Ok(Ok(view)),
            Err(Failure::Lock(error)) if error.is_transient() => Ok(Err(Failure::Lock(error).text())),
            Err(failure) => Err(failure),
        }
    }
}

/// What has been drawn: it is replaced, and what was there before stays.
#[derive(Default)]
struct Screen {
    lines: usize,
}

impl Screen {
    fn draw(&mut self, text: &str) -> Result<(), Failure> {
        let width = rustix::termios::tcgetwinsize(io::stdout()).map_or(80, |size| usize::from(size.ws_col));
        let width = if width == 0 { 80 } else { width };
        let mut frame = String::new();
        if self.lines > 0 {
            frame += &format!("\x1b[{}A", self.lines); // up
        }
        frame += "\r\x1b[J"; // clears what follows
        self.lines = 0;
        // A longer line would wrap, and be two lines.
        for line in text.lines() {
            frame.extend(line.chars().take(width - 1));
            frame += "\n";
            self.lines += 1;
        }
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(frame.as_bytes()).and_then(|()| stdout.flush());
        written.map_err(Failure::os("write to stdout"))
    }
}
