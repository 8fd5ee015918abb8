//! The example `leader`, run as three processes: a killed leader, an outage and resignations.

use std::process::Stdio;
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::support::{Server, eventually, example, soon};

const NAMES: [&str; 3] = ["alice", "bob", "carol"];

/// A term that began: the name of the leader, and its token.
type Term = (String, u64);

/// The processes, and what they have printed, in the order of its arrival.
struct Candidates {
    processes: Vec<(&'static str, Child)>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Candidates {
    fn start(url: &str) -> Candidates {
        let (program, lines) = (example("leader"), Arc::<Mutex<Vec<String>>>::default());
        let processes = NAMES.map(|name| {
            let mut command = Command::new(&program);
            command.args([url, name]).stdout(Stdio::piped()).stdin(Stdio::null()).kill_on_drop(true);
            let mut process = command.spawn().unwrap();
            let mut printed = BufReader::new(process.stdout.take().unwrap()).lines();
            let lines = Arc::clone(&lines);
            tokio::spawn(async move {
                while let Some(line) = printed.next_line().await.unwrap() {
                    lines.lock().unwrap().push(line);
                }
            });
            (name, process)
        });
        Candidates { processes: processes.into(), lines }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    /// The last term that began.
    fn term(&self) -> Option<Term> {
        let term = |line: &String| {
            let (name, token) = line.split_once(" leads under token ")?;
            Some((name.to_owned(), token.parse().unwrap()))
        };
        self.lines().iter().rev().find_map(term)
    }

    /// Waits for a term with a larger token, of which the leader has written its name.
    async fn term_after(&self, server: &Server, before: u64) -> Term {
        eventually("the next leader writes its name", || async {
            let Some((name, token)) = self.term().filter(|(_, token)| *token > before) else { return false };
            let seen: (Option<String>, Option<u64>) =
                server.run(&["MGET", "{leader}:name", "{leader}:token"]).await;
            seen == (Some(name), Some(token))
        })
        .await;
        self.term().unwrap()
    }

    fn remove(&mut self, name: &str) -> Child {
        let place = self.processes.iter().position(|(other, _)| *other == name).unwrap();
        self.processes.remove(place).1
    }
}

/// At each time one process leads. The busy machine may cost it a term, so terms are not counted.
#[tokio::test(flavor = "multi_thread")]
async fn another_process_leads_after_a_kill_an_outage_and_a_resignation() {
    let mut server = Server::start().await;
    let mut candidates = Candidates::start(&server.url());
    let (killed, token) = candidates.term_after(&server, 0).await;
    eventually("the others wait", || async { server.waiters("{lock:leader}:waiters").await == 2 }).await;

    candidates.remove(&killed).kill().await.unwrap();
    let (second, token) = candidates.term_after(&server, token).await;
    assert_ne!(second, killed);

    // Its data is lost as well: the next leader begins with nothing.
    let stepped_down = |lines: &[String]| {
        let ends = |line: &&String| **line == format!("{second} steps down");
        lines.iter().filter(ends).count()
    };
    let before = stepped_down(&candidates.lines());
    server.kill();
    eventually("the leader steps down", || async { stepped_down(&candidates.lines()) > before }).await;
    server.restart().await;
    let (third, token) = candidates.term_after(&server, token).await;

    let end = async |mut process: Child, signal| {
        let id = i32::try_from(process.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
        let status = soon("the process ends", process.wait()).await.unwrap();
        assert!(status.success(), "{status}");
    };
    end(candidates.remove(&third), Signal::TERM).await;
    let (last, _) = candidates.term_after(&server, token).await;
    assert_ne!(last, third);
    end(candidates.remove(&last), Signal::INT).await;
    assert!(candidates.processes.is_empty());
    assert_eq!(server.run::<u64>(&["EXISTS", "lock:leader"]).await, 0, "it resigned before it ended");
    let lines = candidates.lines();
    assert!(!lines.iter().any(|line| line.contains("was refused")), "{lines:#?}");
}
