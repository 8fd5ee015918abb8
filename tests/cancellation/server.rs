//! A private server with a synchronous client: while it replies, nothing else runs in the thread.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::binary::binary;
use super::port::{TRIES, free_port};

/// Longer than anything here takes on a busy machine.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// A server that listens on a socket in its own directory, and needs no port unless it has a
/// replica.
pub(super) struct Server {
    /// Stops with this server.
    replica: Option<Box<Server>>,
    child: Child,
    socket: PathBuf,
    own: RefCell<Option<redis::Connection>>,
    _directory: tempfile::TempDir,
}

impl Server {
    pub(super) fn start() -> Server {
        Server::start_with(&["--port", "0"])
            .unwrap_or_else(|| panic!("{} does not start", binary().display()))
    }

    /// Starts a server with a replica that has caught up.
    pub(super) fn start_replicated() -> Server {
        let ports = (0..TRIES).map(|_| free_port().to_string());
        let at = |port: String| {
            let words = ["--port", &port, "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"];
            Some((Server::start_with(&words)?, port))
        };
        let (mut server, port) = ports.flat_map(at).next().expect("a free port");
        let replica = Server::start_with(&["--port", "0", "--replicaof", "127.0.0.1", &port]);
        let start = Instant::now();
        while server.run::<usize>(&["WAIT", "1", "100"]) == 0 {
            assert!(start.elapsed() < LONGEST_WAIT, "the replica does not follow");
        }
        server.replica = replica.map(Box::new);
        server
    }

    /// Returns `None` if the server ends at once.
    fn start_with(arguments: &[&str]) -> Option<Server> {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let child = Command::new(binary())
            .args(["--save", "", "--appendonly", "no", "--hz", "100"])
            .args(arguments)
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut server =
            Server { replica: None, child, socket, own: RefCell::new(None), _directory: directory };
        let start = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            if server.child.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(start.elapsed() < LONGEST_WAIT, "{} does not start", binary().display());
            std::thread::sleep(Duration::from_millis(5));
        }
        let client = redis::Client::open(format!("unix://{}", server.socket.display())).unwrap();
        *server.own.borrow_mut() = Some(client.get_connection().unwrap());
        Some(server)
    }

    pub(super) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LONGEST_WAIT)).unwrap();
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
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
