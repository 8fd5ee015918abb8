//! `redlatch run` and the processes of its command that have left its process group.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::program::{REDLATCH, RunningProgram, end_while_held, ends, is_alive, is_held, on, pid};
use crate::support::{Server, eventually, soon};

/// `timeout` makes a group of its own. Prints the process id of the command in that group; `sh`
/// ignores TERM, which only KILL can end.
const IN_OTHER_GROUP: &str =
    "timeout 1000 sh -c 'trap \"echo term\" TERM; echo $$; while :; do sleep 0.05; done'; true";

fn words(script: &str) -> Vec<&str> {
    vec!["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script]
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_run_ends_processes_outside_of_the_group() {
    let server = Server::start().await;
    let mut running = RunningProgram::start(on(&server, &words(IN_OTHER_GROUP)));
    let process = pid(&running.line().await);
    running.child.kill().await.unwrap();
    assert_eq!(running.line().await, "term");
    end_while_held(&server, &[process]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_ends_processes_outside_of_the_group() {
    let server = Server::start().await;
    // In another group, and in a session of its own. The command of a `run` within gets TERM once,
    // and ends half a second later.
    let nested = format!(
        "{REDLATCH} run other -- sh -c 'trap \"echo term; n=0\" TERM; echo $$
        while [ \"$n\" != 10 ]; do sleep 0.05; n=${{n:+$((n + 1))}}; done'"
    );
    for script in [IN_OTHER_GROUP.to_owned(), format!("setsid {IN_OTHER_GROUP}"), nested] {
        let mut running = RunningProgram::start(on(&server, &words(&script)));
        let process = pid(&running.line().await);
        assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
        let ended = running.end().await;
        assert_eq!(ended.code, 75, "{script}: {ended:?}");
        // `timeout` passes TERM on, so its command may get a second one.
        let is_nested = script.contains(" run ");
        assert!(ended.stdout == "term\n" || !is_nested && ended.stdout.starts_with("term\n"), "{ended:?}");
        assert!(!is_alive(process), "{script}");
        is_held(&server, "job", false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_run_ends_processes_outside_of_the_group() {
    let server = Server::start().await;
    let mut running = RunningProgram::start(on(&server, &words(IN_OTHER_GROUP)));
    let process = pid(&running.line().await);
    running.signal(Signal::STOP);
    assert_eq!(running.line().await, "term");
    ends(process).await;
    running.signal(Signal::CONT);
    assert_eq!(running.end().await.code, 75);
}

/// A command that ends by a signal before the process that it has started, which reports TERM and
/// ends once a file exists. Prints both process ids.
fn clean_up(wrapper: &str, file: &Path) -> String {
    let trap = format!("echo term; while [ ! -e {} ]; do sleep 0.02; done; echo done; exit", file.display());
    format!("echo $$; {wrapper} bash -c 'trap \"{trap}\" TERM; echo $$; while :; do sleep 0.05; done'; true")
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_stays_held_after_a_signal_until_all_processes_have_ended() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    let mut all = Vec::new();
    for (name, wrapper) in [("group", ""), ("session", "setsid"), ("timeout", "timeout 1000")] {
        let script = clean_up(wrapper, &file);
        let words = ["run", "--ttl", "6s", "--grace", "100ms", name, "--", "sh", "-c", &script];
        let mut running = RunningProgram::start(on(&server, &words));
        let (command, process) = (pid(&running.line().await), pid(&running.line().await));
        running.signal(Signal::TERM);
        assert_eq!(running.line().await, "term", "{name}");
        ends(command).await;
        all.push((name, running, process));
    }
    // Longer than the TTL.
    tokio::time::sleep(Duration::from_millis(6500)).await;
    for (name, ..) in &all {
        let key = format!("lock:{name}");
        assert!(server.run::<bool>(&["EXISTS", &key]).await, "{name}: released too early");
    }
    std::fs::write(file, "").unwrap();
    for (name, running, process) in all {
        let ended = running.end().await;
        assert_eq!(ended.code, 128 + 15, "{ended:?}");
        assert!(ended.stdout.ends_with("done\n"), "{ended:?}");
        assert_eq!(ended.stderr.matches("stays held").count(), 1, "{ended:?}");
        assert!(ended.stderr.contains(&process.as_raw_nonzero().to_string()), "{ended:?}");
        is_held(&server, name, false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn further_signals_reach_the_processes_that_the_command_has_left() {
    let server = Server::start().await;
    // Ends at a second TERM, also if that comes as soon as the first one is reported. `sh` ends at
    // the first one, and `setsid` has executed `bash`.
    let script =
        "setsid bash -c 'trap \"trap - TERM; echo term\" TERM; echo $$; while :; do sleep 0.05; done'; true";
    let mut running = RunningProgram::start(on(&server, &words(script)));
    let process = pid(&running.line().await);
    running.signal(Signal::TERM);
    assert_eq!(running.line().await, "term");
    assert!(is_alive(process));
    running.signal(Signal::TERM);
    assert_eq!(running.end().await.code, 128 + 15);
    assert!(!is_alive(process));
}

#[tokio::test(flavor = "multi_thread")]
async fn loss_ends_the_processes_that_the_command_has_left() {
    let server = Server::start().await;
    for wrapper in ["", "setsid"] {
        let script = clean_up(wrapper, Path::new("/nonexistent"));
        let mut running = RunningProgram::start(on(&server, &words(&script)));
        let (command, process) = (pid(&running.line().await), pid(&running.line().await));
        running.signal(Signal::TERM);
        assert_eq!(running.line().await, "term");
        ends(command).await;
        assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
        let ended = running.end().await;
        assert_eq!(ended.code, 75, "{ended:?}");
        assert!(!is_alive(process), "{wrapper}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn background_process_runs_on_after_the_command() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    // A background process of a command that ends by itself runs on without the lock.
    let loops = format!("while :; do echo >>{}; sleep 0.05; done", log.display());
    let script = format!("setsid sh -c '{loops}' >/dev/null 2>&1 & echo $!; echo $REDLATCH_RUNS");
    let mut command = on(&server, &words(&script));
    command.env("REDLATCH_RUNS", "7-8");
    let mut running = RunningProgram::start(command);
    let process = pid(&running.line().await);
    let runs = running.line().await;
    assert!(runs.starts_with("7-8 ") && runs.split(' ').count() == 2, "{runs}");
    assert_eq!(running.end().await.code, 0);
    is_held(&server, "job", false).await;
    // Neither `run` nor its watchdog exists any more.
    let count = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    let before = count();
    eventually("it goes on", || async { count() >= before + 2 }).await;
    rustix::process::kill_process(process, Signal::KILL).unwrap();
}

/// Its main thread has ended, so that the system shows a zombie; another thread works, and ignores
/// TERM. Prints its process id.
const HEADLESS: &str = "
import ctypes, os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def work():
    while ') Z ' not in open('/proc/%d/stat' % os.getpid()).read():
        time.sleep(0.001)
    print(os.getpid(), flush=True)
    time.sleep(1000)
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(0)";

/// Whether no thread of a process is left.
fn has_no_thread(process: Pid) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()));
    let stats =
        threads.into_iter().flatten().map(|thread| std::fs::read_to_string(thread?.path().join("stat")));
    stats.flatten().all(|stat| stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread")]
async fn process_without_its_main_thread_does_not_run_beside_the_next_holder() {
    let server = Server::start().await;
    // By its group, or by its environment alone.
    for (wrapper, options) in [("", &[][..]), ("setsid", &["--allow-daemons"])] {
        let script = format!("{wrapper} python3 -c \"{HEADLESS}\" & exec sleep 1000");
        let words =
            [&["run", "--ttl", "6s", "--grace", "100ms"], options, &["job", "--", "sh", "-c", &script]]
                .concat();
        // It is waited for after a signal.
        let mut running = RunningProgram::start(on(&server, &words));
        let process = pid(&running.line().await);
        running.signal(Signal::TERM);
        let mut stderr = BufReader::new(running.child.stderr.take().unwrap()).lines();
        let says = soon("a message", stderr.next_line()).await.unwrap().unwrap_or_default();
        rustix::process::kill_process(process, Signal::KILL).unwrap();
        assert!(
            says.contains(&format!("not its processes {}", process.as_raw_nonzero())),
            "{wrapper}: {says}"
        );
        assert_eq!(running.end().await.code, 128 + 15);
        // It is killed after a loss.
        let mut running = RunningProgram::start(on(&server, &words));
        let process = pid(&running.line().await);
        assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
        let status = soon("the program ends", running.child.wait()).await.unwrap();
        let has_ended = has_no_thread(process);
        let _ = rustix::process::kill_process(process, Signal::KILL);
        assert!(has_ended && status.code() == Some(75), "{wrapper}: {status}");
    }
}
