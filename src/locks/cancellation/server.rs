//! A private server that is asked synchronously: while it answers, nothing else in the thread goes on.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::binary::binary;

/// Longer than anything here takes on a machine that is busy with something else.
const PATIENCE: Duration = Duration::from_secs(20);

/// It listens at a socket in a directory of its own: no port can be taken.
pub(super) struct Server {
    child: Child,
    socket: PathBuf,
    own: RefCell<Option<redis::Connection>>,
    _directory: tempfile::TempDir,
}

impl Server {
    pub(super) fn start() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let child = Command::new(binary())
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let server = Server { child, socket, own: RefCell::new(None), _directory: directory };
        let start = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            assert!(start.elapsed() < PATIENCE, "{} does not start", binary().display());
            std::thread::sleep(Duration::from_millis(5));
        }
        let client = redis::Client::open(format!("unix://{}", server.socket.display())).unwrap();
        *server.own.borrow_mut() = Some(client.get_connection().unwrap());
        server
    }

    pub(super) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Runs one command, given as words.
    pub(super) fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        cmd.query(self.own.borrow_mut().as_mut().unwrap()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
