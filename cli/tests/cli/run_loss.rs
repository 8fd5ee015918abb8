//! `redlatch run` when the lease is lost: the command ends before another holder can have the lock.

use std::time::{Duration, SystemTime};

use rustix::process::Signal;

use crate::program::{RunningProgram, ended_before_its_lease, ends, is_alive, is_held, on, pid, run_on};
use crate::support::{DURABLE, Server, Stopwatch, eventually};

/// Prints its process id and that of a process of its group; reports TERM.
const STUBBORN: &str = "sleep 1000 & echo $!; trap 'echo term' TERM; echo $$; while :; do sleep 0.05; done";

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_server_ends_the_group_with_term_then_kill_before_the_lease_ends() {
    // The command reports TERM and continues; its last line says until when it ran.
    let script = "trap 'echo term' TERM; sleep 1000 & echo $!; while :; do date +%s%N; sleep 0.02; done";
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let lose = async |is_killed: bool| {
        let mut server = Server::start_with(&DURABLE).await;
        let mut running = RunningProgram::start(on(&server, &words));
        let grandchild = pid(&running.line().await);
        // After a kill, connections are refused; after a stop, no reply comes.
        if is_killed {
            server.kill()
        } else {
            server.pause()
        }
        let away = (SystemTime::UNIX_EPOCH.elapsed().unwrap(), Stopwatch::start());
        let ended = running.end().await;
        ends(grandchild).await;
        if is_killed {
            server.restart().await
        } else {
            server.resume()
        }
        assert_eq!(ended.code, 75, "{is_killed}: {ended:?}");
        assert!(ended.stderr.contains("could not be renewed"), "{is_killed}: {ended:?}");
        let (_, after) = ended.stdout.split_once("term\n").expect("it got TERM before KILL");
        assert!(!after.contains("term"), "a second TERM ends the clean-up of many programs: {ended:?}");
        ended_before_its_lease(after, away, &is_killed.to_string());
        is_held(&server, "job", false).await;
    };
    tokio::join!(lose(false), lose(true));
}

#[tokio::test(flavor = "multi_thread")]
async fn command_that_obeys_term_has_the_exit_code_of_a_lost_lock() {
    let server = Server::start().await;
    let script = "trap 'echo term; exit 0' TERM; echo in; while :; do sleep 0.05; done";
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    assert_eq!(running.line().await, "in");
    server.pause();
    assert_eq!(running.line().await, "term");
    server.resume();
    assert_eq!(running.end().await.code, 75, "never 0");
}

/// A command that hangs does not hold the lock for ever.
#[tokio::test(flavor = "multi_thread")]
async fn command_that_exceeds_max_hold_ends() {
    let server = Server::start().await;
    let script = "trap 'echo term; exit 0' TERM; echo in; while :; do sleep 0.05; done";
    let words = ["run", "--ttl", "9s", "--max-hold", "9s", "job", "--", "sh", "-c", script];
    let mut running = RunningProgram::start(on(&server, &words));
    assert_eq!(running.line().await, "in");
    assert_eq!(running.line().await, "term");
    let ended = running.end().await;
    assert!(ended.code == 75 && ended.stderr.contains("its lease has reached --max-hold"), "{ended:?}");
    // No point in time is that late.
    let ended = run_on(&server, &["run", "--max-hold", "5000000000000000h", "job", "--", "true"]).await;
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
    let words = ["run", "--ttl", "3s", "--max-hold", "2s", "job", "--", "true"];
    let ended = run_on(&server, &words).await;
    assert!(ended.code == 64 && ended.stderr.contains("at most --max-hold, 2s"), "{ended:?}");
}

/// A minute of the lease is left, as far as `run` knew: the grace counts from TERM all the same, in
/// `run` as in its watchdog, which alone would end the command in time.
#[tokio::test(flavor = "multi_thread")]
async fn revoked_lock_leaves_a_command_the_grace_and_no_more() {
    let server = Server::start().await;
    let words = ["run", "--ttl", "60s", "--grace", "3s", "job", "--", "sh", "-c", STUBBORN];
    let mut running = RunningProgram::start(on(&server, &words));
    let (grandchild, command) = (pid(&running.line().await), pid(&running.line().await));
    assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
    // Once it is connected again, it asks; a renewal would be due after twenty seconds.
    server.kill_connections().await;
    assert_eq!(running.line().await, "term");
    let start = Stopwatch::start();
    let ended = running.end().await;
    assert_eq!(ended.code, 75, "{ended:?}");
    assert!(ended.stderr.contains("was revoked") && ended.stderr.contains("KILL in 3.0s"), "{ended:?}");
    ends(command).await;
    ends(grandchild).await;
    assert!(start.undisturbed() < Duration::from_secs(20), "{start:?}");
}

/// The leader ends at once, without the processes that it has started.
#[tokio::test(flavor = "multi_thread")]
async fn processes_that_outlive_their_leader_have_the_grace() {
    let server = Server::start().await;
    let clean_up = "trap \"echo term; sleep 1; echo done; exit\" TERM; echo in; while :; do sleep 0.1; done";
    for wrapper in ["bash -c", "timeout 1000 bash -c"] {
        let script = format!("{wrapper} '{clean_up}'; echo after");
        let words = ["run", "--ttl", "10m", "--grace", "2m", "job", "--", "sh", "-c", &script];
        let mut running = RunningProgram::start(on(&server, &words));
        assert_eq!(running.line().await, "in");
        assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
        server.kill_connections().await; // once it is connected again, it asks
        // This waits for a minute at most, and KILL comes after two.
        let ended = running.end().await;
        assert_eq!(ended.code, 75, "{ended:?}");
        assert!(ended.stdout.ends_with("done\n"), "{wrapper}: {ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_that_was_lost_unnoticed_has_its_exit_code() {
    let server = Server::start().await;
    let url = server.url();
    let port = url.trim_end_matches('/').rsplit(':').next().unwrap();
    // The key is deleted at once, long before the first renewal.
    let script =
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'DEL lock:job\\r\\n' >&3; read -r answer <&3");
    let ended = run_on(&server, &["run", "job", "--", "bash", "-c", &script]).await;
    assert_eq!(ended.code, 75, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_run_is_replaced_by_its_watchdog() {
    let server = Server::start().await;
    let words = ["run", "--ttl", "6s", "--grace", "3s", "job", "--", "sh", "-c", STUBBORN];
    let mut running = RunningProgram::start(on(&server, &words));
    let (grandchild, command) = (pid(&running.line().await), pid(&running.line().await));
    running.signal(Signal::STOP);
    assert_eq!(running.line().await, "term");
    eventually("the group has ended", || async { !is_alive(command) && !is_alive(grandchild) }).await;
    running.signal(Signal::CONT);
    assert_eq!(running.end().await.code, 75);
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_lock_outlasts_its_ttl() {
    let server = Server::start().await;
    let words = ["run", "--ttl", "6s", "--grace", "100ms", "job", "--", "sh", "-c", "sleep 7; echo done"];
    let ended = run_on(&server, &words).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "done\n"), "{ended:?}");
}
