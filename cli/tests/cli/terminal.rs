//! The program in a pseudo-terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::process::{Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::process::{Child, Command};

use crate::program::{REDLATCH, RunningProgram, WORDS, is_reaped, on, pid};
use crate::support::{Server, eventually, soon};

/// A process whose controlling terminal is a new one, and what it has written.
pub struct Terminal {
    pub child: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
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
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // An error is the end: no process has the terminal open.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                *written.lock().unwrap() += &String::from_utf8_lossy(&bytes[..count]);
            }
        });
        Terminal { child, keyboard, screen, reader }
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
        eventually("the whole screen is read", || async { self.reader.is_finished() }).await;
        (status.code(), self.screen())
    }
}

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

/// The key ends the command, but not a process that it has started. A second Ctrl-C reaches that
/// one too, also in another session.
#[tokio::test(flavor = "multi_thread")]
async fn interrupt_key_keeps_the_lock_until_all_processes_have_ended() {
    let server = Server::start().await;
    // A shell lets a background job ignore INT, and it may not trap what it ignores.
    let clean_up = r#"trap 'trap exit INT; echo cleans' INT; echo re""ady; while :; do sleep 0.05; done"#;
    for wrapper in ["env --default-signal", "setsid env --default-signal"] {
        let command = format!(r#"{wrapper} bash -c "$CLEAN_UP" & exec sleep 1000"#);
        let script = format!("export CLEAN_UP=$1; {REDLATCH} run job -- sh -c '{command}'; echo not-reached");
        let mut terminal = Terminal::start(&["sh", "-c", &script, "sh", clean_up], &server);
        terminal.shows("ready").await;
        terminal.press("\u{3}");
        terminal.shows("cleans").await;
        terminal.shows("stays held").await;
        assert!(server.run::<bool>(&["EXISTS", "lock:job"]).await);
        terminal.press("\u{3}");
        let (code, screen) = terminal.end().await;
        assert!(code != Some(0) && !screen.contains("not-reached"), "{code:?} {screen}");
        crate::program::is_held(&server, "job", false).await;
    }
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

/// Runs a line as the script of a shell, or types it into one.
async fn shell(is_interactive: bool, line: &str, server: &Server) -> Terminal {
    if !is_interactive {
        return Terminal::start(&["bash", "-c", line], server);
    }
    let mut terminal = Terminal::start(&["bash", "--norc", "--noprofile", "-i"], server);
    terminal.press("PS1='$((6 * 7))> '\n");
    terminal.shows("42> ").await;
    terminal.press(&format!("{line}; exit\n"));
    terminal
}

#[tokio::test(flavor = "multi_thread")]
async fn command_with_another_stdin_reads_the_terminal() {
    let server = Server::start().await;
    // With the terminal as its stdin, and another program of the pipeline that does not read it.
    let reads = "sh -c 'echo re''ady; read -r line </dev/tty; echo got-$line'";
    for line in [
        format!("echo x | {REDLATCH} run job -- {reads}; read -r line; echo then-$line"),
        format!("sleep 1000 | {REDLATCH} run job -- {reads}; read -r line; echo then-$line"),
        format!("{REDLATCH} run job -- {reads} </dev/null; read -r line; echo then-$line"),
        format!("{REDLATCH} run job -- {reads} | cat; read -r line; echo then-$line"),
    ] {
        for is_interactive in [false, true] {
            let mut terminal = shell(is_interactive, &line, &server).await;
            terminal.shows("ready").await;
            terminal.press("one\n");
            terminal.shows("got-one").await;
            if line.starts_with("sleep") {
                terminal.press("\u{3}");
                continue;
            }
            terminal.press("two\n");
            terminal.shows("then-two").await;
            assert_eq!(terminal.end().await.0, Some(0), "{line}");
        }
    }
}

/// `less` reads the keys, and its input from a command that does not use the terminal.
#[tokio::test(flavor = "multi_thread")]
async fn pager_behind_the_program_reads_the_terminal() {
    let server = Server::start().await;
    let pager = "(head -n 1 >/dev/null; echo re''ady; read -r key </dev/tty; echo key-$key)";
    let line = format!("{REDLATCH} run job -- seq 1 100000 | {pager}; read -r line; echo then-$line");
    for is_interactive in [false, true] {
        let mut terminal = shell(is_interactive, &line, &server).await;
        terminal.shows("ready").await;
        terminal.press("one\n");
        terminal.shows("key-one").await;
        terminal.press("two\n");
        terminal.shows("then-two").await;
        assert_eq!(terminal.end().await.0, Some(0));
    }
}

/// Ctrl-C reaches the program, which passes it on.
#[tokio::test(flavor = "multi_thread")]
async fn interrupt_key_ends_a_pipeline() {
    let server = Server::start().await;
    let line = format!("{REDLATCH} run job -- sh -c 'echo re''ady; exec sleep 1000' | cat; echo code-$?");
    for is_interactive in [false, true] {
        let mut terminal = shell(is_interactive, &line, &server).await;
        terminal.shows("ready").await;
        terminal.press("\u{3}");
        crate::program::is_held(&server, "job", false).await;
        if is_interactive {
            terminal.press("exit\n");
        }
        terminal.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn script_reads_the_terminal_beside_a_background_run() {
    let server = Server::start().await;
    let command = "sh -c 'echo re''ady; exec sleep 1000'";
    let script = format!("{REDLATCH} run job -- {command} & read -r line; echo then-$line; kill $!; wait");
    let mut terminal = Terminal::start(&["bash", "-c", &script], &server);
    terminal.shows("ready").await;
    terminal.press("one\n");
    terminal.shows("then-one").await;
    assert_eq!(terminal.end().await.0, Some(0));
}

/// A command in the background stops when it reads the terminal, and `fg` lends it.
#[tokio::test(flavor = "multi_thread")]
async fn background_command_that_reads_the_terminal_stops_until_fg() {
    let server = Server::start().await;
    let mut terminal = Terminal::start(&["bash", "--norc", "--noprofile", "-i"], &server);
    terminal.press("set -b; PS1='$((6 * 7))> '\n");
    terminal.shows("42> ").await;
    let reads = "sh -c 'read -r line </dev/tty; echo got-$line'";
    terminal.press(&format!("echo x | {REDLATCH} run job -- {reads} &\n"));
    terminal.shows("Stopped").await;
    terminal.press("fg\n");
    terminal.press("one\n");
    terminal.shows("got-one").await;
    terminal.press("exit 3\n");
    assert_eq!(terminal.end().await.0, Some(3));
}

/// Ctrl-Z where no shell could continue the program, as in `ssh -t HOST redlatch run`: the system
/// does not stop the program, so the command must not stand still with the lock held.
#[tokio::test(flavor = "multi_thread")]
async fn suspend_key_without_a_shell_does_not_stop_the_command() {
    let server = Server::start().await;
    // One process: a shell that is just starting another one waits for that, and is not stopped.
    let ticks = "import time\nwhile True: print('tick', flush=True); time.sleep(0.01)";
    let words = ["run", "job", "--", "python3", "-c", ticks];
    let mut terminal = Terminal::start(&[&WORDS[..], &words].concat(), &server);
    terminal.shows("tick").await;
    for presses in 1..3 {
        terminal.press("\u{1a}");
        // The terminal shows the key once it has sent the signal.
        let after = || terminal.screen().splitn(presses + 1, "^Z").nth(presses).map(str::to_owned);
        let ticks = || after().is_some_and(|after| after.matches("tick").count() > 9);
        eventually("the command goes on", || async { ticks() }).await;
    }
    terminal.press("\u{3}");
    let (code, screen) = terminal.end().await;
    assert_eq!(code, None, "the same signal ended it: {screen}");
    crate::program::is_held(&server, "job", false).await;
}

/// bash goes on after a program that exits with 130: only one that SIGINT has ended ends a script.
/// <https://www.cons.org/cracauer/sigint.html>
#[tokio::test(flavor = "multi_thread")]
async fn interrupt_key_ends_a_bash_script() {
    let server = Server::start().await;
    let command = format!("{REDLATCH} run job -- sh -c 'echo holds; exec sleep 600'; echo went-on");
    let mut terminal = Terminal::start(&["bash", "-c", &command], &server);
    terminal.shows("holds").await;
    let waits = format!("{REDLATCH} run job -- true; echo went-on");
    let mut waiting = Terminal::start(&["bash", "-c", &waits], &server);
    eventually("it waits", || async { server.waiters("{lock:job}:waiters").await == 1 }).await;
    for terminal in [&mut waiting, &mut terminal] {
        terminal.press("\u{3}");
    }
    for terminal in [waiting, terminal] {
        let (code, screen) = terminal.end().await;
        assert_eq!(code, None, "a signal ended it: {screen}");
        assert!(!screen.contains("went-on"), "{screen}");
    }
    crate::program::is_held(&server, "job", false).await;
}

/// Each further Ctrl-C may end the copy of the program that is to take the terminal back. One that
/// comes while the shell dash starts a process is lost to both, so `cat` replaces the shell.
#[tokio::test(flavor = "multi_thread")]
async fn script_has_the_terminal_after_many_interrupt_keys() {
    let server = Server::start().await;
    let script =
        format!("trap : INT; {REDLATCH} run job -- sh -c 'echo holds; exec cat'; read -r x; echo has-$x");
    for _ in 0..4 {
        let mut terminal = Terminal::start(&["bash", "-c", &script], &server);
        terminal.shows("holds").await;
        for _ in 0..20 {
            terminal.press("\u{3}");
        }
        crate::program::is_held(&server, "job", false).await;
        terminal.press("word\n");
        terminal.shows("has-word").await;
        assert_eq!(terminal.end().await.0, Some(0));
    }
}

/// The one Ctrl-C that ends the command does not end the wait for its release: a second one does.
#[tokio::test(flavor = "multi_thread")]
async fn interrupt_key_does_not_end_the_wait_for_the_release() {
    let server = Server::start().await;
    let words = ["run", "--node-timeout", "30s", "control", "--", "sh", "-c", "echo $$; exec sleep 600"];
    let mut control = RunningProgram::start(on(&server, &words));
    let command = pid(&control.line().await);
    let words = ["run", "--node-timeout", "30s", "job", "--", "sh", "-c", "echo pid=$$; exec sleep 600"];
    let mut terminal = Terminal::start(&[&WORDS[..], &words].concat(), &server);
    terminal.shows("pid=").await;
    server.pause();
    terminal.press("\u{3}");
    control.signal(Signal::INT);
    // The second signal is to end the wait: it must not be one for the command.
    is_reaped(command).await;
    control.signal(Signal::INT);
    let ended = control.end().await;
    assert!(ended.stderr.contains("was not released within"), "the second signal ended its wait: {ended:?}");
    assert!(terminal.child.try_wait().unwrap().is_none(), "{}", terminal.screen());
    server.resume();
    let (code, screen) = terminal.end().await;
    assert_eq!(code, None, "{screen}");
    assert!(!screen.contains("was not released"), "{screen}");
    crate::program::is_held(&server, "job", false).await;
}

/// A signal to the program is none of the terminal's.
#[tokio::test(flavor = "multi_thread")]
async fn signal_to_the_program_alone_reaches_no_script() {
    let server = Server::start().await;
    let script = format!("{REDLATCH} run job -- sh -c 'echo run=$PPID.; exec sleep 600'; echo went-on-$?");
    let terminal = Terminal::start(&["bash", "-c", &script], &server);
    terminal.shows(".").await;
    let screen = terminal.screen();
    let (_, rest) = screen.split_once("run=").unwrap();
    kill_process(pid(rest.split_once('.').unwrap().0), Signal::INT).unwrap();
    terminal.shows("went-on-130").await;
    assert_eq!(terminal.end().await.0, Some(0));
}
