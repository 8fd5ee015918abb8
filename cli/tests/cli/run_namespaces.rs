//! `redlatch run` as the first process of a PID namespace, and where /proc is missing, or is that
//! of another namespace. Only root can make such places.

use rustix::process::{Signal, geteuid};

use crate::program::{RunningProgram, is_held, output, wrapped};
use crate::run_escape::makes_cgroups;
use crate::support::{Server, eventually};

/// No cgroup finds the processes.
const HIDE_CGROUPS: &str = "mount -t tmpfs none /sys/fs/cgroup";

#[tokio::test(flavor = "multi_thread")]
async fn command_runs_without_proc() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let hide = format!("{HIDE_CGROUPS} && umount -l /proc && exec \"$@\"");
    let wrapper = ["unshare", "--mount", "sh", "-c", &hide, "sh"];
    let ended = output(wrapped(&wrapper, &server, &["run", "job", "--", "sh", "-c", "exit 7"]), "").await;
    assert_eq!(ended.code, 7, "{ended:?}");
    assert!(ended.stderr.contains("run on if the lock is lost"), "{ended:?}");
    is_held(&server, "job", false).await;
}

/// The process ids of an outer namespace are those of unrelated processes here.
#[tokio::test(flavor = "multi_thread")]
async fn proc_of_another_namespace_kills_no_unrelated_process() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    // The first process of the namespace starts the program, and then an unrelated process with the
    // number that a process of the command has outside.
    let script = format!(
        "{HIDE_CGROUPS} && \"$@\" & run=$!; while [ ! -e {0} ]; do sleep 0.05; done
        echo $(($(cat {0}) - 1)) >/proc/sys/kernel/ns_last_pid; sleep 1000 & inner=$!; echo $inner
        wait $run; code=$?; kill -0 $inner && echo alive; exit $code",
        go.display()
    );
    let wrapper = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &script, "sh"];
    let command = "setsid sh -c 'read -r outer rest </proc/self/stat; echo $outer; exec sleep 1000' & wait";
    let words = ["run", "--ttl", "6s", "--grace", "100ms", "job", "--", "sh", "-c", command];
    let mut running = RunningProgram::start(wrapped(&wrapper, &server, &words));
    let outer = running.line().await;
    std::fs::write(directory.path().join("new"), &outer).unwrap();
    std::fs::rename(directory.path().join("new"), &go).unwrap();
    assert_eq!(running.line().await, outer);
    assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
    let ended = running.end().await;
    assert_eq!((ended.code, ended.stdout.as_str()), (75, "alive\n"), "{ended:?}");
    assert!(ended.stderr.contains("run on if the lock is lost"), "{ended:?}");
}

/// The cgroup shows the command's processes, by their numbers here. Where none can be made, `run`
/// says what it does not reach.
#[tokio::test(flavor = "multi_thread")]
async fn lock_stays_held_for_what_only_the_cgroup_shows() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let left = format!("trap '' TERM; echo started; while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let command = format!("trap 'echo ended; exit 7' TERM; setsid sh -c \"{left}\" & wait; wait");
    let words = ["run", "--ttl", "9s", "--grace", "100ms", "job", "--", "sh", "-c", &command];
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child"];
    let mut running = RunningProgram::start(wrapped(&wrapper, &server, &words));
    assert_eq!(running.line().await, "started");
    let run = children(&running.pid().to_string()).trim().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(run).unwrap(), Signal::TERM).unwrap();
    assert_eq!(running.line().await, "ended");
    let renewed_twice = server.scripts_run().await + 2;
    let is_free = || async { !server.run::<bool>(&["EXISTS", "lock:job"]).await };
    let goes_on = || async { is_free().await || server.scripts_run().await >= renewed_twice };
    eventually("it is renewed, or released", goes_on).await;
    let was_released = is_free().await;
    std::fs::write(&go, "").unwrap();
    let ended = running.end().await;
    if makes_cgroups(&server).await {
        assert!(!was_released && ended.code == 7, "{ended:?}");
    } else {
        assert!(ended.stderr.contains("run on if the lock is lost"), "{ended:?}");
    }
    is_held(&server, "job", false).await;
}

/// A container's first process is the parent of all orphans, and of the children of a shell that
/// executed it.
#[tokio::test(flavor = "multi_thread")]
async fn first_process_of_a_namespace_leaves_no_zombies() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    // An orphan, and whether it is gone after it has ended.
    let command =
        "orphan=$(sh -c 'sleep 0 >/dev/null & echo $!'); while [ -e /proc/$orphan ]; do sleep 0.05; done
        echo gone";
    for options in [&[][..], &["--allow-daemons"]] {
        let words = [&["run"], options, &["job", "--", "sh", "-c", command]].concat();
        let ended = output(wrapped(&wrapper, &server, &words), "").await;
        assert_eq!((ended.code, ended.stdout.as_str()), (0, "gone\n"), "{options:?}: {ended:?}");
    }
    // While it waits for the lock too: a child that is older than it.
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let wrapper = [&wrapper[..], &["sh", "-c", "sleep 0.1 & exec \"$@\"", "sh"]].concat();
    let mut running =
        RunningProgram::start(wrapped(&wrapper, &server, &["run", "job", "--", "echo", "started"]));
    eventually("it waits", || async { server.waiters("{lock:job}:waiters").await == 1 }).await;
    let first = children(&running.pid().to_string());
    eventually("the child is reaped", || async { children(&first).is_empty() }).await;
    guard.release().await.unwrap();
    assert_eq!(running.line().await, "started");
    assert_eq!(running.end().await.code, 0);
}

/// The process ids of a process's children, also of those that are not reaped.
fn children(id: &str) -> String {
    let id = id.trim();
    std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap()
}
