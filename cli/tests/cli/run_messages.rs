//! `redlatch run` while no program reads its messages.

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::program::{REDLATCH, RunningProgram, ends, is_held, on, output, pid, run_on};
use crate::support::{Server, Stopwatch, eventually, soon};
use crate::terminal::Terminal;

/// Ignores TERM. Prints its process id.
const STUBBORN: &str = "trap '' TERM; echo $$; while :; do sleep 0.05; done";

/// A pipe that takes no more bytes.
pub fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

/// What was written to a pipe, until all of its writers have ended.
async fn rest(mut pipe: PipeReader) -> String {
    let read = move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).unwrap();
        text
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_lock_ends_the_command_although_stderr_is_blocked() {
    let server = Server::start().await;
    let (reader, writer) = full_pipe();
    let words = ["run", "--ttl", "30s", "--grace", "1s", "job", "--", "sh", "-c", STUBBORN];
    let mut running = RunningProgram::start_with_stderr(on(&server, &words), writer.into());
    let command = pid(&running.line().await);
    let start = Stopwatch::start();
    assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
    ends(command).await;
    // A renewal finds out after a third of the TTL; without it the lease ends after the whole.
    assert!(start.undisturbed() < Duration::from_secs(20), "it ran on: {start:?}");
    let (text, ended) = tokio::join!(rest(reader), running.end());
    assert_eq!(ended.code, 75, "{ended:?}");
    assert!(text.contains("was revoked"), "{text}");
}

/// A wrapper around a script that takes the same lock: with -n the work is never done, and without
/// it the wait never ends.
#[tokio::test(flavor = "multi_thread")]
async fn run_under_its_own_lock_says_what_nesting_needs() {
    let server = Server::start().await;
    let guard = server.locks().await.mutex("job").unwrap().lock().await.unwrap();
    let nested = |words: &[&str], outer| {
        let mut command = on(&server, words);
        command.env("REDLATCH_NAME", outer);
        command
    };
    for wait in ["-n", "-w0.5"] {
        let ended = output(nested(&["run", wait, "job", "true"], "job"), "").await;
        assert!(ended.code == 1 && ended.stderr.contains("both need -r"), "{ended:?}");
        let ended = output(nested(&["run", wait, "job", "true"], "other"), "").await;
        assert_eq!((ended.code, ended.stderr.as_str()), (1, ""));
    }
    guard.release().await.unwrap();
    let ended = output(nested(&["run", "-n", "job", "true"], "job"), "").await;
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "of another server, for instance");
}

/// With `-v`, one line says that it waits, and for whom, and one that it gives up.
#[tokio::test(flavor = "multi_thread")]
async fn verbose_run_names_the_holder_if_it_waits_or_gives_up() {
    let server = Server::start().await;
    let words = ["run", "-v", "job", "echo", "started"];
    let ended = run_on(&server, &words).await;
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("started\n", ""), "it did not wait");
    let holder = ["run", "--label", "the-holder", "job", "sh", "-c", "echo in; read -r line"];
    for others in ["no other waits", "1 other waits"] {
        let mut command = on(&server, &holder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        is_held(&server, "job", true).await;
        let other = match others {
            "1 other waits" => Some(RunningProgram::start(on(&server, &["run", "job", "true"]))),
            _ => None,
        };
        let queued = u64::from(other.is_some());
        eventually("the other waits", || async { server.waiters("{lock:job}:waiters").await == queued })
            .await;
        let mut waiting = RunningProgram::start(on(&server, &words));
        let mut stderr = BufReader::new(waiting.child.stderr.take().unwrap()).lines();
        let line = soon("a line", stderr.next_line()).await.unwrap().unwrap();
        assert!(line.starts_with("redlatch: lock \"job\": waits: held by redlatch:the-holder"), "{line}");
        assert!(line.contains("s left; ") && line.ends_with(others), "{line}");
        drop(holder.stdin.take());
        assert_eq!(waiting.line().await, "started");
        assert_eq!(soon("the end of stderr", stderr.next_line()).await.unwrap(), None);
        assert_eq!(waiting.end().await.code, 0);
        holder.wait().await.unwrap();
        if let Some(other) = other {
            assert_eq!(other.end().await.stderr, "", "without -v");
        }
    }
    // A run that gives up says so as well.
    let guard = server.locks().await.mutex("job").unwrap().lock().await.unwrap();
    for limit in [&["-n"][..], &["-w", "0.01"], &["-w", "1"]] {
        let ended = run_on(&server, &[&["run", "-v"], limit, &["job", "true"]].concat()).await;
        let last = ended.stderr.lines().last().unwrap_or_default();
        assert!(ended.code == 1 && last.contains("\"job\": held by "), "{ended:?}");
        assert!(last.ends_with("s left: nothing is started"), "{ended:?}");
        let ended = run_on(&server, &[&["run"], limit, &["job", "true"]].concat()).await;
        assert_eq!((ended.code, ended.stderr.as_str()), (1, ""));
    }
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn verbose_run_starts_its_command_although_stderr_is_blocked() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let (reader, writer) = full_pipe();
    let words = ["run", "-v", "job", "echo", "started"];
    let mut running = RunningProgram::start_with_stderr(on(&server, &words), writer.into());
    eventually("it waits", || async { server.waiters("{lock:job}:waiters").await == 1 }).await;
    let before = server.scripts_run().await;
    eventually("the holder is looked up", || async { server.scripts_run().await > before }).await;
    guard.release().await.unwrap();
    assert_eq!(running.line().await, "started");
    is_held(&server, "job", false).await;
    let (_, ended) = tokio::join!(rest(reader), running.end());
    assert_eq!(ended.code, 0, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_a_wait_although_stderr_is_blocked() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let (_reader, writer) = full_pipe();
    let words = ["run", "-v", "job", "echo", "started"];
    let running = RunningProgram::start_with_stderr(on(&server, &words), writer.into());
    eventually("it waits", || async { server.waiters("{lock:job}:waiters").await == 1 }).await;
    let before = server.scripts_run().await;
    eventually("the holder is looked up", || async { server.scripts_run().await > before }).await;
    running.signal(Signal::INT);
    assert_eq!(running.end().await.code, 128 + 2);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_is_released_although_stderr_is_blocked() {
    let server = Server::start().await;
    let (reader, writer) = full_pipe();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    // A process that outlives the command until the file exists.
    let waits = format!("trap \"\" TERM; echo in; while [ ! -e {} ]; do sleep 0.05; done", file.display());
    let script = format!("sh -c '{waits}' & exec sleep 1000");
    let mut running = RunningProgram::start_with_stderr(
        on(&server, &["run", "--ttl", "6s", "--grace", "100ms", "job", "--", "sh", "-c", &script]),
        writer.into(),
    );
    assert_eq!(running.line().await, "in");
    running.signal(Signal::TERM);
    // The message that names the process comes after a second, and each renewal after two.
    let renewed = server.scripts_run().await + 2;
    eventually("it is renewed twice", || async { server.scripts_run().await >= renewed }).await;
    assert!(server.run::<bool>(&["EXISTS", "lock:job"]).await);
    std::fs::write(file, "").unwrap();
    is_held(&server, "job", false).await;
    let (text, ended) = tokio::join!(rest(reader), running.end());
    assert_eq!(ended.code, 128 + 15, "{ended:?}");
    assert!(text.contains("stays held"), "{text}");
}

/// The copy of the program that was to become the command says nothing itself.
#[tokio::test(flavor = "multi_thread")]
async fn lock_is_released_although_stderr_is_blocked_and_the_command_cannot_run() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("script");
    std::fs::write(&file, "#!/no/interpreter\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (reader, writer) = full_pipe();
    let words = ["run", "--hold-at-least", "10ms", "job", "--", file.to_str().unwrap()];
    let running = RunningProgram::start_with_stderr(on(&server, &words), writer.into());
    eventually("it has the lock", || async { server.run::<bool>(&["EXISTS", "{lock:job}:fence"]).await })
        .await;
    is_held(&server, "job", false).await;
    let (text, ended) = tokio::join!(rest(reader), running.end());
    assert_eq!(ended.code, 127, "{ended:?}");
    assert!(text.contains("cannot run") && text.contains("interpreter"), "{text}");
}

/// A reader that never reads does not keep a program that gets TERM.
#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_a_run_that_waits_for_stderr() {
    let server = Server::start().await;
    let (_reader, writer) = full_pipe();
    let words = ["run", "--ttl", "30s", "--grace", "1s", "job", "--", "sh", "-c", STUBBORN];
    let mut running = RunningProgram::start_with_stderr(on(&server, &words), writer.into());
    let command = pid(&running.line().await);
    assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
    ends(command).await;
    // Until the signal is no longer passed on to the command, it has no effect.
    let mut run = running.child;
    let pid = run.id().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    eventually("the program ends", || {
        let _ = rustix::process::kill_process(pid, Signal::TERM);
        let ended = run.try_wait().unwrap();
        async move { ended.is_some_and(|status| status.code() == Some(75)) }
    })
    .await;
}

/// With `stty tostop`, a program in the background that writes to the terminal is stopped.
#[tokio::test(flavor = "multi_thread")]
async fn revoked_lock_ends_the_command_of_a_background_run_although_the_terminal_would_stop_it() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let (script, file) = (directory.path().join("script"), directory.path().join("file"));
    std::fs::write(&script, format!("exec >{}; {STUBBORN}", file.display())).unwrap();
    let mut terminal = Terminal::start(&["bash", "--norc", "--noprofile", "-i"], &server);
    terminal.press("set -b; stty tostop; PS1='$((6 * 7))> '\n");
    terminal.shows("42> ").await;
    let run = format!("{REDLATCH} run --ttl 30s --grace 1s job -- sh {}", script.display());
    terminal.press(&format!("{run} &\n"));
    let written = || std::fs::read_to_string(&file).unwrap_or_default();
    eventually("the command runs", || async { written().ends_with('\n') }).await;
    let start = Stopwatch::start();
    assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
    ends(pid(&written())).await;
    assert!(start.undisturbed() < Duration::from_secs(20), "it ran on: {start:?}");
    // Once nothing depends on it, it stops as other programs do.
    terminal.shows("Stopped").await;
    terminal.press("fg\n");
    terminal.shows("was revoked").await;
    terminal.press("exit\n");
    terminal.end().await;
}
