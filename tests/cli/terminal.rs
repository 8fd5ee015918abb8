//! The program in a pseudo-terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::process::{Child, Command};

use crate::support::{Server, eventually, soon};

/// A process whose controlling terminal is a new one, and what it has written.
pub struct Terminal {
    pub child: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
}

impl Terminal {
    pub fn start(words: &[&str], server: &Server) -> Terminal {
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&main).unwrap();
        unlockpt(&main).unwrap();
        let path = ptsname(&main, Vec::new()).unwrap().into_string().unwrap();
        let side = File::options().read(true).write(true).open(path).unwrap();
        let copy = || Stdio::from(OwnedFd::from(side.try_clone().unwrap()));
        // Makes the terminal of its stdin the controlling one.
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", "env", "--default-signal"])
            .args(words)
            .env("REDLATCH_REDIS", server.url());
        command.stdin(copy()).stdout(copy()).stderr(copy()).kill_on_drop(true);
        let child = command.spawn().unwrap();
        let keyboard = File::from(main);
        let (mut output, screen) = (keyboard.try_clone().unwrap(), Arc::new(Mutex::new(String::new())));
        let written = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // An error is the end: no process has the terminal open.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                *written.lock().unwrap() += &String::from_utf8_lossy(&bytes[..count]);
            }
        });
        Terminal { child, keyboard, screen }
    }

    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this text is on the screen.
    pub async fn shows(&self, text: &str) {
        eventually(text, || async { self.screen().contains(text) }).await;
    }

    pub fn screen(&self) -> String {
        self.screen.lock().unwrap().clone()
    }

    pub async fn end(mut self) -> (Option<i32>, String) {
        let status = soon("the terminal's process ends", self.child.wait()).await.unwrap();
        (status.code(), self.screen())
    }
}

const REDLATCH: &str = env!("CARGO_BIN_EXE_redlatch");

#[tokio::test(flavor = "multi_thread")]
async fn command_reads_the_terminal_and_its_caller_reads_it_afterwards() {
    let server = Server::start().await;
    let script = format!(
        "{REDLATCH} run job -- sh -c 'echo ready; read -r line; echo got-$line'; read -r line; echo then-$line"
    );
    let mut terminal = Terminal::start(&["sh", "-c", &script], &server);
    terminal.shows("ready").await;
    terminal.press("one\n");
    terminal.shows("got-one").await;
    terminal.press("two\n");
    terminal.shows("then-two").await;
    assert_eq!(terminal.end().await.0, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupt_key_ends_the_command_and_its_caller() {
    let server = Server::start().await;
    let script = format!("{REDLATCH} run job -- sh -c 'echo ready; exec sleep 1000'; echo not-reached");
    let mut terminal = Terminal::start(&["sh", "-c", &script], &server);
    terminal.shows("ready").await;
    terminal.press("\u{3}");
    let (code, screen) = terminal.end().await;
    assert!(code != Some(0) && !screen.contains("not-reached"), "{code:?} {screen}");
    crate::program::is_held(&server, "job", false).await;
}

/// Ctrl-Z stops the command and the program, so that the shell returns; `fg` continues both.
#[tokio::test(flavor = "multi_thread")]
async fn suspend_key_returns_to_the_shell_and_fg_continues() {
    let server = Server::start().await;
    let mut terminal = Terminal::start(&["bash", "--norc", "--noprofile", "-i"], &server);
    terminal.press("PS1='$((6 * 7))> '\n");
    terminal.shows("42> ").await;
    terminal.press(&format!(
        "{REDLATCH} run job -- sh -c 'echo re''ady; read -r line; echo got-$line'; echo code-$?\n"
    ));
    terminal.shows("ready").await;
    terminal.press("\u{1a}");
    terminal.shows("Stopped").await;
    terminal.press("echo shell-$((1 + 1))\n");
    terminal.shows("shell-2").await;
    terminal.press("fg\n");
    terminal.press("one\n");
    terminal.shows("got-one").await;
    terminal.press("exit 3\n");
    assert_eq!(terminal.end().await.0, Some(3));
}
