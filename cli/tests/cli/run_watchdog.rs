//! `redlatch run` whose watchdog is stopped or killed, also while it starts.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{
    RunningProgram, end_while_held, ended_before_its_lease, expiry, is_alive, is_held, on, pid, watchdog_of,
    wrapped,
};
use crate::support::{LONGEST_WAIT, Server, Stopwatch, eventually, queued, soon};

/// Ignores TERM. Prints its process id.
const STUBBORN: &str = "trap '' TERM; echo $$; while :; do sleep 0.05; done";

/// Whether a watchdog has left the session of its `run`: then it is ready, or almost so.
fn has_session(watchdog: Pid) -> bool {
    let stat =
        std::fs::read_to_string(format!("/proc/{}/stat", watchdog.as_raw_nonzero())).unwrap_or_default();
    let session = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(3)?.parse::<i32>().ok());
    session == Some(watchdog.as_raw_nonzero().get())
}

/// Whether no child of a `run` but its watchdog is alive.
fn has_no_command(run: Pid) -> bool {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.as_raw_nonzero()));
    let watchdog = watchdog_of(run);
    children.unwrap().split_whitespace().map(pid).all(|child| Some(child) == watchdog || !is_alive(child))
}

/// Stops the first watchdog of a `run` while it starts. `None`: it was ready before.
async fn stop_first(run: Pid) -> Option<Pid> {
    let stop = move || {
        let start = std::time::Instant::now();
        let first = loop {
            match watchdog_of(run) {
                Some(first) => break first,
                None => assert!(start.elapsed() < LONGEST_WAIT, "no watchdog"),
            }
        };
        let _ = kill_process(first, Signal::STOP);
        (!has_session(first)).then_some(first)
    };
    tokio::task::spawn_blocking(stop).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_a_run_whose_watchdog_does_not_start() {
    let server = Server::start().await;
    let watch = Stopwatch::start();
    loop {
        let running = RunningProgram::start(on(&server, &["run", "job", "--", "echo", "started"]));
        let stopped = stop_first(running.pid()).await;
        running.signal(Signal::TERM);
        let ended = running.end().await;
        is_held(&server, "job", false).await;
        if let Some(watchdog) = stopped {
            assert_eq!((ended.code, ended.stdout.as_str()), (128 + 15, ""), "{ended:?}");
            assert!(!is_alive(watchdog));
            return;
        }
        assert!(watch.elapsed() < LONGEST_WAIT, "each watchdog was ready before");
    }
}

/// As after ten seconds, only sooner: a unit test has the limit.
#[tokio::test(flavor = "multi_thread")]
async fn run_whose_first_watchdog_is_killed_starts_nothing() {
    let server = Server::start().await;
    let watch = Stopwatch::start();
    loop {
        let running = RunningProgram::start(on(&server, &["run", "job", "--", "echo", "started"]));
        let stopped = stop_first(running.pid()).await;
        if let Some(watchdog) = stopped {
            kill_process(watchdog, Signal::KILL).unwrap();
        } else {
            // It was stopped when it was ready.
            running.signal(Signal::TERM);
        }
        let ended = running.end().await;
        is_held(&server, "job", false).await;
        if stopped.is_some() {
            assert_eq!((ended.code, ended.stdout.as_str()), (71, ""), "{ended:?}");
            assert!(ended.stderr.contains("could not start the watchdog"), "{ended:?}");
            return;
        }
        assert!(watch.elapsed() < LONGEST_WAIT, "each watchdog was ready before");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn command_ends_before_its_lease_although_no_watchdog_starts() {
    let server = Server::start().await;
    let script = "trap '' TERM; echo in; while :; do date +%s%N; sleep 0.02; done";
    let words = ["run", "--ttl", "6s", "--grace", "1s", "job", "--", "sh", "-c", script];
    // Once the command runs, this copy of the program loses the right to be executed.
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("redlatch");
    let start = "cp \"$3\" \"$0\"; shift 3; exec env --default-signal \"$0\" \"$@\"";
    let wrapper = ["sh", "-c", start, copy.to_str().unwrap()];
    let mut running = RunningProgram::start(wrapped(&wrapper, &server, &words));
    assert_eq!(running.line().await, "in");
    std::fs::set_permissions(&copy, Permissions::from_mode(0o600)).unwrap();
    kill_process(watchdog_of(running.pid()).unwrap(), Signal::KILL).unwrap();
    server.pause();
    let paused = (SystemTime::UNIX_EPOCH.elapsed().unwrap(), Stopwatch::start());
    // The lines do not end before the command does.
    let ended = soon("the command ends", running.end()).await;
    server.resume();
    assert!(ended.code == 75 && ended.stderr.contains("another one cannot be started"), "{ended:?}");
    ended_before_its_lease(&ended.stdout, paused, "no watchdog");
}

/// Whichever process is killed or stopped, the other one sends KILL at its time.
#[tokio::test(flavor = "multi_thread")]
async fn one_killed_or_stopped_during_the_grace_changes_nothing() {
    let server = Server::start().await;
    let script = "trap 'echo term' TERM; echo in; while :; do date +%s%N; sleep 0.02; done";
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    for (is_run, signal) in
        [(false, Signal::KILL), (false, Signal::STOP), (true, Signal::KILL), (true, Signal::STOP)]
    {
        let mut running = RunningProgram::start(on(&server, &words));
        assert_eq!(running.line().await, "in");
        server.pause();
        let paused = (SystemTime::UNIX_EPOCH.elapsed().unwrap(), Stopwatch::start());
        while running.line().await != "term" {}
        let run = running.pid();
        let process = if is_run { run } else { watchdog_of(run).unwrap() };
        kill_process(process, signal).unwrap();
        let mut stdout = String::new();
        // It ends only after it has resumed, and the command before.
        if is_run && signal == Signal::STOP {
            eventually("the command has ended", || async { has_no_command(run) }).await;
            kill_process(run, Signal::CONT).unwrap();
        }
        if is_run && signal == Signal::KILL {
            stdout += &running.rest_of_stdout().await;
            running.child.wait().await.unwrap();
        } else {
            let ended = running.end().await;
            assert_eq!(ended.code, 75, "{is_run} {signal:?}: {ended:?}");
            stdout += &ended.stdout;
        }
        server.resume();
        assert!(!stdout.contains("term"), "{is_run} {signal:?}: TERM came again: {stdout}");
        ended_before_its_lease(&stdout, paused, &format!("{is_run} {signal:?}"));
        is_held(&server, "job", false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watchdog_that_was_stopped_does_not_end_a_renewed_command() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let script = format!("echo in; while [ ! -e {} ]; do sleep 0.05; done; echo done", go.display());
    let words = ["run", "--ttl", "6s", "--grace", "100ms", "job", "--", "sh", "-c", &script];
    let mut running = RunningProgram::start(on(&server, &words));
    assert_eq!(running.line().await, "in");
    let watchdog = watchdog_of(running.pid()).unwrap();
    kill_process(watchdog, Signal::STOP).unwrap();
    // What it knew of the lease is over by then.
    tokio::time::sleep(Duration::from_millis(6500)).await;
    let _ = kill_process(watchdog, Signal::CONT);
    let renewed = server.scripts_run().await + 2;
    eventually("it is renewed twice", || async { server.scripts_run().await >= renewed }).await;
    std::fs::write(&go, "").unwrap();
    let ended = running.end().await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "done\n"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_watchdog_knows_the_deadline() {
    let server = Server::start().await;
    for signal in [Signal::KILL, Signal::STOP] {
        let words = ["run", "--ttl", "6s", "--grace", "1s", "job", "--", "sh", "-c", STUBBORN];
        let mut running = RunningProgram::start(on(&server, &words));
        let command = pid(&running.line().await);
        let first = watchdog_of(running.pid()).unwrap();
        kill_process(first, signal).unwrap();
        let next = || watchdog_of(running.pid()).is_some_and(|next| next != first && has_session(next));
        eventually("another watchdog", || async { next() }).await;
        // It has its orders by the second renewal from now on.
        for _ in 0..2 {
            let before = expiry(&server).await;
            eventually("the lease is renewed", || async { expiry(&server).await > before + 500 }).await;
        }
        running.signal(Signal::STOP);
        end_while_held(&server, &[command]).await;
        running.signal(Signal::CONT);
        assert_eq!(running.end().await.code, 75);
    }
}

/// The next watchdogs are killed and stopped too, and then `run` is killed: the last one does what
/// the first one would have done.
#[tokio::test(flavor = "multi_thread")]
async fn last_of_several_watchdogs_ends_the_command_of_a_killed_run() {
    let server = Server::start().await;
    let script = "exec 2>/dev/null; trap 'echo term' TERM; trap 'echo usr1' USR1; echo $$
        while :; do sleep 0.05; done";
    let words = ["run", "--ttl", "15s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    let (run, command) = (running.pid(), pid(&running.line().await));
    for signal in [Signal::KILL, Signal::STOP, Signal::KILL] {
        let before = watchdog_of(run).unwrap();
        kill_process(before, signal).unwrap();
        let has_next = || async { watchdog_of(run).is_some_and(|next| next != before) };
        eventually("another watchdog", has_next).await;
        // `run` passes this signal on only after it has told the watchdog what it has to know.
        running.signal(Signal::USR1);
        assert_eq!(running.line().await, "usr1");
    }
    running.child.kill().await.unwrap();
    assert_eq!(running.line().await, "term");
    end_while_held(&server, &[command]).await;
    assert_eq!(running.rest_of_stdout().await, "", "a second TERM");
}

/// A lease that was granted to a waiter lasts for three seconds, and the grace is longer.
#[tokio::test(flavor = "multi_thread")]
async fn killed_run_that_was_just_granted_the_lock_ends_its_command_before_the_lease() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let words = ["run", "--ttl", "30s", "--grace", "15s", "job", "--", "sh", "-c", STUBBORN];
    let started = on(&server, &words);
    let wait = async move {
        let mut running = RunningProgram::start(started);
        let command = pid(&running.line().await);
        running.child.kill().await.unwrap();
        command
    };
    let waiting = queued(async || vec![server.waiters("{lock:job}:waiters").await], wait).await;
    guard.release().await.unwrap();
    let command = waiting.await.unwrap();
    end_while_held(&server, &[command]).await;
    is_held(&server, "job", false).await;
}

/// Once `run` is killed, only its watchdog is left by which one finds the lock.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn watchdog_names_its_lock_and_its_run() {
    let server = Server::start().await;
    let mut running = RunningProgram::start(on(
        &server,
        &["run", "-v", "job", "--", "sh", "-c", "echo in; exec sleep 1000"],
    ));
    assert_eq!(running.line().await, "in");
    let watchdog = watchdog_of(running.pid()).unwrap().as_raw_nonzero();
    let read = |file| std::fs::read_to_string(format!("/proc/{watchdog}/{file}")).unwrap();
    assert_eq!(read("comm"), "lock-watchdog\n");
    let run = running.pid().as_raw_nonzero();
    assert!(read("cmdline").ends_with(&format!("\0{run}\0job\0")), "{:?}", read("cmdline"));
    running.signal(Signal::TERM);
    assert_eq!(running.end().await.code, 128 + 15);
}

/// The watchdog has sent TERM by then, and a second one would end the clean-up of many programs.
#[tokio::test(flavor = "multi_thread")]
async fn run_that_resumes_during_the_grace_sends_no_second_term() {
    let server = Server::start().await;
    let script = "trap 'echo term' TERM; echo in; while :; do sleep 0.02; done";
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    assert_eq!(running.line().await, "in");
    server.pause();
    running.signal(Signal::STOP);
    assert_eq!(running.line().await, "term");
    running.signal(Signal::CONT);
    let ended = running.end().await;
    server.resume();
    assert_eq!((ended.code, ended.stdout.as_str()), (75, ""), "{ended:?}");
}

/// Only the leader dies of the watchdog's TERM. What else there is has its grace, and gets KILL
/// before the lock is free.
#[tokio::test(flavor = "multi_thread")]
async fn run_that_resumes_during_the_grace_leaves_no_process() {
    let server = Server::start().await;
    let script = r#"sh -c "trap '' TERM; echo \$\$; exec >&-; while :; do sleep 0.05; done" & echo $$; exec sleep 600"#;
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    let both = [running.line().await, running.line().await].map(|line| pid(&line));
    running.signal(Signal::STOP);
    eventually("the leader has ended", || async { !both.iter().all(|process| is_alive(*process)) }).await;
    running.signal(Signal::CONT);
    let ended = running.end().await;
    assert_eq!(ended.code, 75, "{ended:?}");
    assert!(!both.iter().any(|process| is_alive(*process)), "a process is left");
    is_held(&server, "job", false).await;
}
