//! `redlatch run` and processes that would escape it: they start one another in turn, execute
//! themselves, or clear their environment.

use std::path::PathBuf;
use std::time::Instant;

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tokio::process::Command;

use crate::program::{REDLATCH, RunningProgram, ends, is_alive, is_held, on, pid, run_on, wrapped};
use crate::support::{Server, eventually, soon};

/// Starts the next process, and ends.
const CHAIN: &str = "echo $$ >>\"$1\"\nsetsid sh \"$0\" \"$1\" &";

/// Executes itself for ever.
const SELF: &str = "echo $$ >>\"$1\"\nexec setsid sh \"$0\" \"$1\"";

/// How the processes of a command are found: in a cgroup; without one; and by their environment.
type Way = (bool, &'static [&'static str]);
const WAYS: [Way; 3] = [(true, &[]), (false, &[]), (false, &["--allow-daemons"])];

/// The program, with cgroups as this machine has them, or with none.
fn command(server: &Server, has_cgroups: bool, words: &[&str]) -> Command {
    // Another user may hardly ever make a cgroup.
    if has_cgroups || !geteuid().is_root() {
        return on(server, words);
    }
    let hide = "mount -t tmpfs none /sys/fs/cgroup && exec \"$@\"";
    wrapped(&["unshare", "--mount", "sh", "-c", hide, "sh"], server, words)
}

fn words<'a>(options: &[&'a str], name: &'a str, script: &'a str) -> Vec<&'a str> {
    [&["run", "--ttl", "6s", "--grace", "100ms"], options, &[name, "--", "sh", "-c", script]].concat()
}

async fn revoke(server: &Server, name: &str) {
    assert!(server.locks().await.mutex(name).unwrap().force_release().await.unwrap());
}

/// Starts commands that leave such a script behind, one in each way, and ends them.
async fn end_chains(server: &Server, text: &str, ways: &[Way], end: impl AsyncFn(&str, RunningProgram)) {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    std::fs::write(&script, text).unwrap();
    let chain = async |way: usize| {
        let Some((has_cgroups, options)) = ways.get(way).copied() else { return };
        let name = &format!("{}-{way}", text.len());
        let log = directory.path().join(name);
        let start = format!("sh {} {} & exec sleep 1000", script.display(), log.display());
        let words = words(options, name, &start);
        let running = RunningProgram::start(command(server, has_cgroups, &words));
        let count = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
        eventually("the processes run", || async { count() > 5 }).await;
        // Any process that is left has the standard output.
        end(name, running).await;
    };
    tokio::join!(chain(0), chain(1), chain(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_ends_processes_that_start_one_another() {
    let server = Server::start().await;
    let end = async |name: &str, running: RunningProgram| {
        revoke(&server, name).await;
        let ended = running.end().await;
        assert_eq!(ended.code, 75, "{name}: {ended:?}");
    };
    end_chains(&server, SELF, &WAYS, &end).await;
    // By their environment alone, it may miss those that end at once.
    end_chains(&server, CHAIN, &WAYS[..2], &end).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchdog_ends_processes_that_start_one_another() {
    let server = Server::start().await;
    let end = async |_: &str, mut running: RunningProgram| {
        running.child.kill().await.unwrap();
        running.rest_of_stdout().await;
    };
    end_chains(&server, SELF, &WAYS, &end).await;
    // Without a cgroup, it may miss those that end at once.
    let way = if makes_cgroups(&server).await { &WAYS[..1] } else { &[] };
    end_chains(&server, CHAIN, way, &end).await;
}

/// Starts many processes, which only KILL ends, and writes their ids into a file.
const MANY: &str = "trap '' TERM; n=0
while [ $n != 2000 ]; do sleep 1000 & echo $! >>$1; n=$((n + 1)); done; echo started; wait";

/// They are outside of the command's group, where no signal reaches all of them at once.
#[ignore = "so many processes that end at once keep the tests beside this one waiting for seconds"]
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_processes_have_ended_once_run_exits() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    std::fs::write(&script, MANY).unwrap();
    for (has_cgroups, options) in &WAYS[..2] {
        let log = directory.path().join(has_cgroups.to_string());
        let start = format!("setsid sh {} {}; true", script.display(), log.display());
        let words = words(options, "job", &start);
        let mut running = RunningProgram::start(command(&server, *has_cgroups, &words));
        assert_eq!(running.line().await, "started");
        revoke(&server, "job").await;
        // Once it is connected again, it asks, and does not wait for its next renewal.
        server.kill_connections().await;
        let status = soon("the program ends", running.child.wait()).await.unwrap();
        let ids = std::fs::read_to_string(log).unwrap();
        let left = ids.lines().filter(|id| is_alive(pid(id))).count();
        assert_eq!((status.code(), ids.lines().count(), left), (Some(75), 2000, 0), "{has_cgroups}");
    }
}

/// A process without a name for its `run`, in a session of its own, whose parent has ended.
const DAEMON: &str = "(env -i setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' &); exec sleep 1000";

#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_ends_processes_that_clear_their_environment() {
    let server = Server::start().await;
    for (has_cgroups, options) in &WAYS[..2] {
        let mut running =
            RunningProgram::start(command(&server, *has_cgroups, &words(options, "job", DAEMON)));
        let process = pid(&running.line().await);
        revoke(&server, "job").await;
        assert_eq!(running.end().await.code, 75);
        assert!(!is_alive(process), "{has_cgroups}");
    }
}

/// Without a cgroup, its watchdog finds them as descendants of a `run` that is stopped, but lives.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_run_ends_processes_that_clear_their_environment() {
    let server = Server::start().await;
    for (has_cgroups, options) in &WAYS[..2] {
        let mut running =
            RunningProgram::start(command(&server, *has_cgroups, &words(options, "job", DAEMON)));
        let process = pid(&running.line().await);
        running.signal(Signal::STOP);
        ends(process).await;
        running.signal(Signal::CONT);
        assert_eq!(running.end().await.code, 75, "{has_cgroups}");
    }
}

/// Whether a `run` makes cgroups here.
pub async fn makes_cgroups(server: &Server) -> bool {
    let ended = run_on(server, &words(&[], "probe", "cat /proc/self/cgroup")).await;
    ended.stdout.contains("redlatch-")
}

#[tokio::test(flavor = "multi_thread")]
async fn watchdog_ends_processes_that_clear_their_environment_in_a_cgroup() {
    let server = Server::start().await;
    if !makes_cgroups(&server).await {
        return;
    }
    let mut running = RunningProgram::start(on(&server, &words(&[], "job", DAEMON)));
    let process = pid(&running.line().await);
    let folder = cgroup_of(process).unwrap();
    running.child.kill().await.unwrap();
    ends(process).await;
    eventually("the cgroup is removed", || async { !folder.exists() }).await;
}

/// The cgroup that a `run` has made for this process.
pub fn cgroup_of(pid: Pid) -> Option<PathBuf> {
    folder(&std::fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero())).unwrap())
}

/// The same, from its line of /proc/PID/cgroup.
fn folder(cgroups: &str) -> Option<PathBuf> {
    folder_of(cgroups).filter(|folder| folder.to_string_lossy().contains("redlatch-"))
}

/// The cgroup of the test, in which a `run` makes its own.
fn own_cgroup() -> Option<PathBuf> {
    folder_of(&std::fs::read_to_string("/proc/self/cgroup").unwrap())
}

fn folder_of(cgroups: &str) -> Option<PathBuf> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
    Some(format!("{}{}", mount?.split(' ').nth(4)?, own?).into())
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_runs_on_where_it_may() {
    let server = Server::start().await;
    let options = ["--allow-daemons"];
    let mut running = RunningProgram::start(on(&server, &words(&options, "job", DAEMON)));
    let process = pid(&running.line().await);
    assert_eq!(cgroup_of(process), None);
    running.signal(Signal::TERM);
    // The lock does not wait for it. It has the standard output.
    is_held(&server, "job", false).await;
    assert!(is_alive(process));
    kill_process(process, Signal::KILL).unwrap();
    assert_eq!(running.end().await.code, 128 + 15);
}

#[tokio::test(flavor = "multi_thread")]
async fn background_process_leaves_the_cgroup_with_its_command() {
    let server = Server::start().await;
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!; read -r line </proc/self/cgroup";
    let mut running = RunningProgram::start(on(&server, &words(&[], "job", script)));
    let process = pid(&running.line().await);
    assert_eq!(running.end().await.code, 0);
    assert!(is_alive(process));
    assert_eq!(cgroup_of(process), None);
    kill_process(process, Signal::KILL).unwrap();
}

/// It is killed at some moment of its start: the watchdog knows of the cgroup before it is made.
#[tokio::test(flavor = "multi_thread")]
async fn no_cgroup_is_left_of_a_run_that_is_killed_as_it_starts() {
    let server = Server::start().await;
    let start = Instant::now();
    if !makes_cgroups(&server).await {
        return;
    }
    // A whole run takes this long, on this machine and beside the tests of this moment.
    let whole = start.elapsed();
    let parent = own_cgroup().unwrap();
    for number in 0..30 {
        let mut running = RunningProgram::start(on(&server, &words(&[], &format!("job-{number}"), DAEMON)));
        let name = format!("redlatch-{}-", running.pid().as_raw_nonzero());
        tokio::time::sleep(whole * number / 30).await;
        running.child.kill().await.unwrap();
        let is_left = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with(&name))
        };
        eventually("nothing is left", || async { !std::fs::read_dir(&parent).unwrap().any(is_left) }).await;
    }
}

/// The system counts a process as one of its cgroup until its memory is freed, which takes a while.
#[tokio::test(flavor = "multi_thread")]
async fn cgroup_is_removed_although_a_process_takes_long_to_end() {
    let server = Server::start().await;
    if !makes_cgroups(&server).await {
        return;
    }
    let large = "import time; data = bytearray(b'x') * (100 << 20); print(flush=True); time.sleep(1000)";
    let script = format!(
        "grep ^0:: /proc/self/cgroup; coproc python3 -c \"{large}\"; read -r line <&${{COPROC[0]}}; kill -9 $COPROC_PID"
    );
    let ended = run_on(&server, &["run", "job", "--", "bash", "-c", &script]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let folder = folder(&ended.stdout).unwrap();
    assert!(!folder.exists(), "{}", folder.display());
}

/// A nested `run` has its cgroup in that of the outer one, which cannot be removed before.
#[tokio::test(flavor = "multi_thread")]
async fn nested_run_that_outlives_the_outer_one_removes_both_cgroups() {
    let server = Server::start().await;
    if !makes_cgroups(&server).await {
        return;
    }
    let inner = "echo $PPID; grep ^0:: /proc/self/cgroup; exec sleep 1000";
    // Once the second line is there, the outer command ends.
    let script = format!(
        "coproc {REDLATCH} run inner -- sh -c '{inner}' 2>/dev/null; read -r run <&${{COPROC[0]}}; echo $run
        read -r line <&${{COPROC[0]}}; echo $line"
    );
    let ended = run_on(&server, &["run", "outer", "--", "bash", "-c", &script]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let run = pid(ended.stdout.lines().next().unwrap());
    let folder = folder(&ended.stdout).unwrap();
    let outer = folder.parent().unwrap().to_owned();
    assert!(folder.exists() && outer.file_name().unwrap().to_str().unwrap().starts_with("redlatch-"));
    kill_process(run, Signal::TERM).unwrap();
    eventually("both cgroups are removed", || async { !folder.exists() && !outer.exists() }).await;
}

/// Every user can read the name. A process with the id in its environment is the command's.
#[tokio::test(flavor = "multi_thread")]
async fn cgroup_does_not_show_the_id_of_its_run() {
    let server = Server::start().await;
    let script = "echo $REDLATCH_RUNS; grep ^0:: /proc/self/cgroup";
    let ended = run_on(&server, &["run", "job", "--", "sh", "-c", script]).await;
    let (ids, cgroup) = ended.stdout.split_once('\n').unwrap();
    let id = ids.split(' ').next_back().unwrap();
    assert!(!id.is_empty() && !cgroup.contains(id), "{ended:?}");
}
