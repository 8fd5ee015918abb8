//! The commands of docs/as-a-service.md: those of its unit and of its image.

use rustix::process::Signal;

use crate::program::{RunningProgram, on};
use crate::support::{Server, eventually};

const PAGE: &str = include_str!("../../../docs/as-a-service.md");

/// What the page has behind this, up to the end of the line.
fn line(start: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("\n{start}")).expect(start);
    rest.lines().next().unwrap()
}

/// The words of an instruction of the image.
fn instruction(name: &str) -> Vec<String> {
    serde_json::from_str(line(name)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_the_service_page_hand_over_at_a_stop() {
    let server = Server::start().await;
    let unit: Vec<String> = line("ExecStart=").split(' ').map(str::to_owned).collect();
    let image = [instruction("ENTRYPOINT "), instruction("CMD ")].concat();
    for words in [unit, image] {
        let [program, options @ .., reporter] = &words[..] else { panic!("{words:?}") };
        assert!(program.ends_with("redlatch") && reporter.ends_with("reporter"), "{words:?}");
        let mut words: Vec<_> = options.iter().map(String::as_str).collect();
        words.extend(["sh", "-c", "echo works; exec sleep 1000"]);
        let mut leader = RunningProgram::start(on(&server, &words));
        assert_eq!(leader.line().await, "works");
        let mut next = RunningProgram::start(on(&server, &words));
        let waits = || async { server.waiters("{lock:reporter}:waiters").await == 1 };
        eventually("another machine waits", waits).await;
        leader.signal(Signal::TERM);
        let ended = leader.end().await;
        assert_eq!(ended.code, 143, "{ended:?}");
        assert_eq!(next.line().await, "works");
        next.signal(Signal::TERM);
        let ended = next.end().await;
        assert_eq!(ended.code, 143, "{ended:?}");
    }
}
