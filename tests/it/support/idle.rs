//! Servers of finished tests, kept for the next test of the same topology.
//!
//! A cluster or a group with sentinels takes seconds to form. Servers that a test has
//! [changed](super::Server::is_changed) beyond their data are not kept, nor are those of a failed
//! test.

use std::collections::VecDeque;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex};

use super::{Deployment, Server, Topology};

/// The number of deployments to keep: tests run in the order of their names, so few topologies are
/// in use at a time.
const LIMIT: usize = 4;

static IDLE: Mutex<VecDeque<Deployment>> = Mutex::new(VecDeque::new());

/// Statics are never dropped, so a separate process kills the idle servers once this process has
/// ended, however it ended.
static GUARDIAN: LazyLock<Mutex<Child>> = LazyLock::new(|| {
    let script = "while read -r word pid directory; do
        kept=$(printf '%s\n' \"$kept\" | grep -v \"^$pid \")
        [ $word = keep ] && kept=$(printf '%s\n%s' \"$kept\" \"$pid $directory\")
    done
    printf '%s\n' \"$kept\" | while read -r pid directory; do
        [ -n \"$pid\" ] && kill -9 $pid && rm -rf \"$directory\"
    done";
    let shell = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
    Mutex::new(shell)
});

/// Takes idle servers of this topology, if any are kept.
pub(super) async fn take(topology: Topology) -> Option<Deployment> {
    let deployment = {
        let mut idle = IDLE.lock().unwrap();
        let place = idle.iter().position(|one| one.topology() == topology)?;
        idle.remove(place)?
    };
    note("forget", &deployment);
    for server in deployment.masters() {
        server.run::<()>(&["FLUSHALL"]).await;
    }
    for server in deployment.data() {
        server.reset().await;
    }
    deployment.is_whole().await;
    Some(deployment)
}

/// Keeps the servers of a successful test, unless it has changed them.
pub(super) fn keep(deployment: Deployment) {
    if deployment.all().any(Server::is_changed) {
        return;
    }
    note("keep", &deployment);
    let mut idle = IDLE.lock().unwrap();
    idle.push_back(deployment);
    let surplus = if idle.len() > LIMIT { idle.pop_front() } else { None };
    drop(idle);
    if let Some(surplus) = surplus {
        note("forget", &surplus);
    }
}

fn note(word: &str, deployment: &Deployment) {
    let mut guardian = GUARDIAN.lock().unwrap();
    let stdin = guardian.stdin.as_mut().unwrap();
    for server in deployment.all() {
        writeln!(stdin, "{word} {} {}", server.process_id(), server.directory().display()).unwrap();
    }
}
