//! The server of `redlatch run` fails while the command runs: it is away for a moment, or loses its
//! data.

use rustix::process::Signal;

use crate::program::{RunningProgram, ends, expiry, is_held, on, pid, run_on};
use crate::support::{DURABLE, Server, eventually};

/// Reports TERM, and goes on; ends with a code of its own at USR1. Prints its process id.
const COMMAND: &str = "trap 'echo term' TERM; trap 'exit 7' USR1; echo $$; while :; do sleep 0.05; done";

/// Whether a renewal has reached the machine, but not the server, which is stopped. It is longer
/// than the `PING`s of the time until then.
fn has_unread_renewal(server: &Server) -> bool {
    let local = format!(":{:04X}", server.port());
    let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
    connections.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Its own address, the state of an established connection, and the bytes in both queues.
        let unread = words[4].split(':').next_back().and_then(|bytes| u32::from_str_radix(bytes, 16).ok());
        words[1].ends_with(&local) && words[3] == "01" && unread > Some(200)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn command_goes_on_if_the_server_is_back_with_its_data_before_the_lease_ends() {
    for is_killed in [false, true] {
        let mut server = Server::start_with(&DURABLE).await;
        let words = ["run", "--ttl", "9s", "--grace", "1s", "job", "--", "sh", "-c", COMMAND];
        let mut running = RunningProgram::start(on(&server, &words));
        let command = pid(&running.line().await);
        if is_killed {
            server.kill();
            server.restart().await;
        } else {
            server.pause();
            eventually("a renewal is sent", || async { has_unread_renewal(&server) }).await;
            server.resume();
        }
        let before = expiry(&server).await;
        eventually("the lease is renewed", || async { expiry(&server).await > before + 500 }).await;
        running.signal(Signal::USR1);
        ends(command).await;
        let ended = running.end().await;
        assert_eq!((ended.code, ended.stdout.as_str()), (7, ""), "{is_killed}: {ended:?}");
        assert!(!ended.stderr.contains("redlatch"), "an outage without a loss has no message: {ended:?}");
        is_held(&server, "job", false).await;
    }
}

/// Long before a renewal is due, which it would be after 200 seconds.
#[tokio::test(flavor = "multi_thread")]
async fn server_that_restarts_without_its_data_ends_the_command_once_run_is_connected_again() {
    let mut server = Server::start().await;
    let words = ["run", "--ttl", "10m", "--grace", "3s", "job", "--", "sh", "-c", COMMAND];
    let mut running = RunningProgram::start(on(&server, &words));
    let command = pid(&running.line().await);
    server.kill();
    server.restart().await;
    assert_eq!(running.line().await, "term");
    let next = run_on(&server, &["run", "-n", "job", "--", "true"]).await;
    assert_eq!(next.code, 0, "{next:?}");
    let ended = running.end().await;
    assert_eq!((ended.code, ended.stdout.as_str()), (75, ""), "{ended:?}");
    assert!(ended.stderr.contains("the server has lost its data: the command gets TERM, and KILL in 3.0s"));
    ends(command).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_lost_by_a_server_that_stays_up_ends_the_command_at_the_next_renewal() {
    let server = Server::start().await;
    let words = ["run", "--ttl", "15s", "--grace", "3s", "job", "--", "sh", "-c", COMMAND];
    let mut running = RunningProgram::start(on(&server, &words));
    let command = pid(&running.line().await);
    let before = server.scripts_run().await;
    server.run::<()>(&["FLUSHALL"]).await;
    assert_eq!(running.line().await, "term");
    assert_eq!(server.scripts_run().await, before + 1);
    let ended = running.end().await;
    assert_eq!((ended.code, ended.stdout.as_str()), (75, ""), "{ended:?}");
    assert!(ended.stderr.contains("the server has lost its data"), "{ended:?}");
    ends(command).await;
}

/// A limit below the node timeout ends before the silence is noticed: nothing said that the lock
/// is held, so this is no conflict, which cron is not to be told of.
#[tokio::test(flavor = "multi_thread")]
async fn silence_of_a_server_is_no_conflict() {
    let server = Server::start().await;
    server.run::<()>(&["CLIENT", "PAUSE", "600000", "WRITE"]).await;
    let ended = run_on(&server, &["run", "-w", "0.3", "-E", "0", "job", "--", "echo", "started"]).await;
    server.run::<()>(&["CLIENT", "UNPAUSE"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (69, ""), "{ended:?}");
    assert!(ended.stderr.contains("no reply arrived"), "{ended:?}");
}
