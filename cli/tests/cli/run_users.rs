//! `redlatch run` as a user that may not signal its own command, or may have few processes or open
//! files. Only root can make such users.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::process::{Signal, geteuid, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::program::{RunningProgram, output, pid, wrapped};
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

/// Neither limit may end the program by a panic, whatever it is that the system refuses.
#[tokio::test(flavor = "multi_thread")]
async fn low_limits_have_an_exit_code_and_a_message() {
    let server = Server::start().await;
    let words = ["run", "job", "--", "true"];
    let judge = async |limit: &str, wrapper: &[&str]| {
        let script = format!("ulimit {limit}; exec \"$@\"");
        let wrapper = [wrapper, &["bash", "-c", &script, "bash"]].concat();
        let ended = output(wrapped(&wrapper, &server, &words), "").await;
        // With some more, only the connection fails.
        assert!([0, 69, 71].contains(&ended.code), "{limit}: {ended:?}");
        assert_eq!(ended.code == 0, ended.stderr.is_empty(), "{limit}: {ended:?}");
        assert!(ended.stderr.is_empty() || ended.stderr.starts_with("redlatch: could not "), "{ended:?}");
        ended.code
    };
    for files in 6..20 {
        let code = judge(&format!("-n {files}"), &[]).await;
        assert!(files > 8 || code == 71, "{files}: {code}");
    }
    let directory = tempfile::tempdir().unwrap();
    if root_program(directory.path()).is_some() {
        assert_eq!(judge("-u 0", &UNPRIVILEGED).await, 71);
    }
}
