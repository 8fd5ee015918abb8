//! Signals to `redlatch run`: while it waits, and while its command runs.

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::program::{
    REDLATCH, RunningProgram, end_while_held, ends, is_alive, is_held, is_reaped, on, pid, program, run_on,
    watchdog_of,
};
use crate::support::{LONGEST_WAIT, Proxy, Server, Stopwatch, eventually};

const SIGNALS: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Prints its process id, and stops.
const STOPPED: &str = "echo $$; kill -STOP $$; exec sleep 1000";

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_the_wait_and_starts_nothing() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    for signal in SIGNALS {
        let running = RunningProgram::start(on(&server, &["run", "job", "--", "echo", "started"]));
        let is_queued = || async { server.waiters("{lock:job}:waiters").await == 1 };
        eventually("the run waits", is_queued).await;
        running.signal(signal);
        let ended = running.end().await;
        assert_eq!((ended.code, ended.stdout.as_str()), (128 + signal.as_raw(), ""), "{ended:?}");
        assert_eq!(server.waiters("{lock:job}:waiters").await, 0, "it has left the queue");
    }
    guard.release().await.unwrap();
    locks.close(std::time::Duration::from_secs(5)).await.unwrap();
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_a_wait_for_a_silent_server() {
    let server = Server::start().await;
    server.pause();
    let running = RunningProgram::start(on(&server, &["run", "job", "--", "echo", "started"]));
    // The handlers replace the default action before the program connects.
    let status = format!("/proc/{}/status", running.pid().as_raw_nonzero());
    let catches = || async {
        let status = std::fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & 0x4000 != 0
    };
    eventually("the program handles TERM", catches).await;
    running.signal(Signal::TERM);
    let ended = running.end().await;
    assert_eq!((ended.code, ended.stdout.as_str()), (128 + 15, ""), "{ended:?}");
    server.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_the_wait_for_a_release() {
    let server = Server::start().await;
    let script = format!("kill -STOP {}; echo $$; exit 7", server.process_id());
    let words = ["run", "--node-timeout", "60s", "job", "--", "sh", "-c", &script];
    let mut running = RunningProgram::start(on(&server, &words));
    let command = pid(&running.line().await);
    is_reaped(command).await;
    running.signal(Signal::TERM);
    // Without the signal, it takes several times the limit of a minute, and no line comes so late.
    let ended = running.end().await;
    assert_eq!(ended.code, 7, "{ended:?}");
    assert!(ended.stderr.contains("until its TTL expires"), "{ended:?}");
    server.resume();
    is_held(&server, "job", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_is_forwarded_and_the_command_decides() {
    let server = Server::start().await;
    for signal in SIGNALS {
        let script =
            format!("trap 'echo caught; exit 9' {}; echo in; while :; do sleep 0.05; done", signal.as_raw());
        let mut running = RunningProgram::start(on(&server, &["run", "job", "--", "sh", "-c", &script]));
        assert_eq!(running.line().await, "in");
        running.signal(signal);
        let ended = running.end().await;
        assert_eq!((ended.code, ended.stdout.as_str()), (9, "caught\n"), "{signal:?}: {ended:?}");
        is_held(&server, "job", false).await;
        // Without a handler, the whole group dies.
        let script = "sleep 1000 >/dev/null 2>&1 & echo $!; echo $$; wait";
        let mut running = RunningProgram::start(on(&server, &["run", "job", "--", "sh", "-c", script]));
        let (grandchild, command) = (pid(&running.line().await), pid(&running.line().await));
        running.signal(signal);
        ends(command).await;
        // A shell lets its background jobs ignore INT and QUIT, and the lock stays held until they
        // have ended. The job may have ended before it ignored them.
        if [Signal::INT, Signal::QUIT].contains(&signal) {
            let _ = kill_process(grandchild, Signal::KILL);
        }
        ends(grandchild).await;
        let ended = running.end().await;
        assert_eq!(ended.code, 128 + signal.as_raw(), "{signal:?}: {ended:?}");
        is_held(&server, "job", false).await;
    }
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn command_that_expects_usr1_goes_on_after_it() {
    let server = Server::start().await;
    for signal in [Signal::USR1, Signal::USR2] {
        let script = format!("trap 'echo caught' {}; echo in; while :; do sleep 0.05; done", signal.as_raw());
        let mut running = RunningProgram::start(on(&server, &["run", "job", "--", "sh", "-c", &script]));
        assert_eq!(running.line().await, "in");
        running.signal(signal);
        assert_eq!(running.line().await, "caught");
        assert!(server.run::<bool>(&["EXISTS", "lock:job"]).await);
        running.signal(Signal::TERM);
        assert_eq!(running.end().await.code, 128 + 15);
        is_held(&server, "job", false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_without_a_meaning_ends_the_command_and_releases_the_lock() {
    let server = Server::start().await;
    let numbers = ["ALRM", "VTALRM", "PROF", "XCPU", "IO", "PWR", "STKFLT", "RTMIN", "RTMAX"];
    for name in numbers {
        let script = "trap 'echo term; exit 9' TERM; echo $PPID; while :; do sleep 0.05; done";
        let mut running = RunningProgram::start(on(&server, &["run", "job", "--", "sh", "-c", script]));
        let run = running.line().await;
        let sent = tokio::process::Command::new("bash").args(["-c", &format!("kill -{name} {run}")]).status();
        assert!(sent.await.unwrap().success());
        let ended = running.end().await;
        assert_eq!((ended.code, ended.stdout.as_str()), (9, "term\n"), "{name}: {ended:?}");
        assert!(!server.run::<bool>(&["EXISTS", "lock:job"]).await, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_command_continues_for_a_signal() {
    let server = Server::start().await;
    for signal in SIGNALS {
        let mut running = RunningProgram::start(on(&server, &["run", "job", "--", "sh", "-c", STOPPED]));
        let command = pid(&running.line().await);
        let stat = format!("/proc/{}/stat", command.as_raw_nonzero());
        let is_stopped = || async { std::fs::read_to_string(&stat).unwrap().contains(") T ") };
        eventually("the command has stopped", is_stopped).await;
        running.signal(signal);
        assert_eq!(running.end().await.code, 128 + signal.as_raw());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ignored_signal_stays_ignored() {
    let server = Server::start().await;
    let script = format!("trap '' HUP; exec {REDLATCH} run job -- sh -c 'echo $$; exec sleep 1000'");
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", &script]).env("REDLATCH_REDIS", server.url()).kill_on_drop(true);
    let mut running = RunningProgram::start(command);
    let command = pid(&running.line().await);
    running.signal(Signal::HUP);
    kill_process(command, Signal::HUP).unwrap();
    running.signal(Signal::TERM);
    assert_eq!(running.end().await.code, 128 + 15);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_run_leaves_no_process_and_the_lock_expires() {
    let server = Server::start().await;
    let script = "sleep 1000 & echo $!; trap 'echo term' TERM; echo $$; while :; do sleep 0.05; done";
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    let (grandchild, command) = (pid(&running.line().await), pid(&running.line().await));
    running.child.kill().await.unwrap();
    // The command ignores TERM, so it gets KILL, before the lease ends.
    assert_eq!(running.line().await, "term");
    end_while_held(&server, &[command, grandchild]).await;
    is_held(&server, "job", false).await;
    assert_eq!(run_on(&server, &["run", "-n", "job", "--", "true"]).await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_watchdog_is_replaced() {
    let server = Server::start().await;
    let words = ["run", "job", "--", "sh", "-c", "echo $$; exec sleep 1000"];
    let mut running = RunningProgram::start(on(&server, &words));
    let command = pid(&running.line().await);
    let parent = running.pid();
    let watchdog = || watchdog_of(parent);
    let first = watchdog().unwrap();
    kill_process(first, Signal::KILL).unwrap();
    eventually("another watchdog", || async { watchdog().is_some_and(|now| now != first) }).await;
    // Its ready byte follows; `run` reads it before it does anything else.
    let second = watchdog().unwrap();
    let has_session = || async {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", second.as_raw_nonzero())).unwrap();
        let session = stat.rsplit_once(") ").unwrap().1.split(' ').nth(3).unwrap().to_owned();
        session == second.as_raw_nonzero().to_string()
    };
    eventually("the watchdog is ready", has_session).await;
    running.signal(Signal::TERM);
    assert_eq!(running.end().await.code, 128 + 15);
    assert!(!is_alive(command));
    ends(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_watchdog_does_not_keep_the_lock() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let script = format!("echo in; while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let words = ["run", "job", "--", "sh", "-c", &script];
    let mut running = RunningProgram::start(on(&server, &words));
    assert_eq!(running.line().await, "in");
    let watchdog = watchdog_of(running.pid()).unwrap();
    kill_process(watchdog, Signal::STOP).unwrap();
    std::fs::write(&go, "").unwrap();
    assert_eq!(running.end().await.code, 0);
    assert!(!is_alive(watchdog));
    is_held(&server, "job", false).await;
}

/// With `-v`, it asks for the holder before it gives up, and the server may not answer.
#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_the_question_for_the_holder() {
    let server = Server::start().await;
    let guard = server.locks().await.mutex("job").unwrap().lock().await.unwrap();
    let proxy = Proxy::start(server.port()).await;
    let url = proxy.url();
    let watch = Stopwatch::start();
    let ended = loop {
        let mut command = program(&["run", "-n", "-v", "job", "--", "echo", "started"]);
        command.env("REDLATCH_REDIS", &url);
        // Time to hold the second reply back before the first one has arrived.
        proxy.slow_down(Some(Duration::from_millis(100)));
        let before = server.scripts_run().await;
        let mut running = RunningProgram::start(command);
        eventually("the lock is refused", || async { server.scripts_run().await > before }).await;
        proxy.hold_replies(true);
        let before = server.scripts_run().await;
        eventually("it asks for the holder, or has ended", || {
            let has_ended = running.child.try_wait().unwrap().is_some();
            let asks = async || server.scripts_run().await > before;
            async move { has_ended || asks().await }
        })
        .await;
        proxy.slow_down(None);
        if running.child.try_wait().unwrap().is_none() {
            running.signal(Signal::TERM);
            break running.end().await;
        }
        proxy.hold_replies(false);
        assert!(watch.elapsed() < LONGEST_WAIT, "each reply came before");
    };
    proxy.hold_replies(false);
    assert_eq!((ended.code, ended.stdout.as_str()), (128 + 15, ""), "{ended:?}");
    guard.release().await.unwrap();
}
