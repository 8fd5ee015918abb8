//! `redlatch run` as a user that may not signal its own command. Only root can make such a command.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::process::{Signal, geteuid, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::program::{RunningProgram, pid, wrapped};
use crate::support::{Server, soon};

const UNPRIVILEGED: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// A program that runs other programs as root, whoever starts it. `None`: there is none here.
fn root_program(folder: &Path) -> Option<String> {
    if !geteuid().is_root() {
        return None;
    }
    let program = folder.join("as-root");
    std::fs::copy("/usr/bin/setpriv", &program).ok()?;
    std::fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let program = program.to_str().unwrap().to_owned();
    // The file system may ignore the mode, and the user may not reach the program under test.
    let mut probe = std::process::Command::new(UNPRIVILEGED[0]);
    probe.args(&UNPRIVILEGED[1..]).args([
        &program,
        "--reuid=0",
        "env",
        env!("CARGO_BIN_EXE_redlatch"),
        "--version",
    ]);
    probe.output().is_ok_and(|output| output.status.success()).then_some(program)
}

#[tokio::test(flavor = "multi_thread")]
async fn command_of_another_user_is_reported() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = root_program(directory.path()) else { return };
    let sleep = "echo $$; exec sleep 1000";
    let within = format!("{program} --reuid=0 sh -c '{sleep}'; true");
    let direct = [program.as_str(), "--reuid=0", "sh", "-c", sleep];
    for (command, says) in [(&direct[..], "changes its user"), (&["sh", "-c", &within], "may not signal the")]
    {
        let words = [&["run", "--ttl", "6s", "--grace", "100ms", "job", "--"], command].concat();
        let mut running = RunningProgram::start(wrapped(&UNPRIVILEGED, &server, &words));
        let mut lines = BufReader::new(running.child.stderr.take().unwrap()).lines();
        let mut line = async || soon("a message", lines.next_line()).await.unwrap().expect("stderr is open");
        // Before the command starts; or at the first renewal.
        let first = line().await;
        assert!(first.contains(says), "{first}");
        let process = pid(&running.line().await);
        assert!(server.locks().await.mutex("job").unwrap().force_release().await.unwrap());
        let number = process.as_raw_nonzero().to_string();
        loop {
            let text = line().await;
            if text.contains("revoked") {
                assert!(text.contains(&format!("may not signal {number}")), "{text}");
                break;
            }
        }
        kill_process(process, Signal::KILL).unwrap();
        assert_eq!(running.end().await.code, 75);
    }
}
