//! What to measure, and for how long.

use std::time::Duration;

use super::Outcome;

const USAGE: &str = "usage: scripts/bench [--quick] [pairs] [handover] [turns] [renewal] [server] [peers] [scale] [topologies]";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Pairs,
    Handover,
    /// Tasks of one client that pass a mutex on, or read together.
    Turns,
    Renewal,
    /// The server's CPU time.
    Server,
    /// redlatch and other libraries, measured by the programs in `benches/peers`.
    Peers,
    /// Many holders, waiters and readers, a killed holder, a new client.
    Scale,
    /// A quorum, a cluster, and clients in processes of their own.
    Topologies,
}

#[derive(Debug)]
pub(crate) struct Plan {
    /// The command that repeats the run.
    pub(crate) command: String,
    /// How long each kind of pair is measured with each number of tasks, in all its slices
    /// together.
    pub(crate) pairs: Duration,
    /// How long one window of handovers is, and how many there are for each number of clients.
    pub(crate) window: Duration,
    pub(crate) windows: usize,
    /// How long one slice of the server's CPU time is, and how many rounds of slices there are.
    pub(crate) slice: Duration,
    pub(crate) rounds: usize,
    /// How long one slice of a peer's pairs is, one window of its turns, and how many rounds there
    /// are.
    pub(crate) peer_slice: Duration,
    pub(crate) peer_window: Duration,
    pub(crate) peer_rounds: usize,
    sections: Vec<Section>,
}

impl Plan {
    pub(crate) fn from_arguments(arguments: impl Iterator<Item = String>) -> Outcome<Plan> {
        // `cargo bench` adds --bench, whatever the harness.
        let arguments: Vec<String> = arguments.filter(|argument| argument != "--bench").collect();
        let (mut quick, mut sections) = (false, Vec::new());
        for argument in &arguments {
            match argument.as_str() {
                "--quick" => quick = true,
                "pairs" => sections.push(Section::Pairs),
                "handover" => sections.push(Section::Handover),
                "turns" => sections.push(Section::Turns),
                "renewal" => sections.push(Section::Renewal),
                "server" => sections.push(Section::Server),
                "peers" => sections.push(Section::Peers),
                "scale" => sections.push(Section::Scale),
                "topologies" => sections.push(Section::Topologies),
                other => return Err(format!("{other}? {USAGE}").into()),
            }
        }
        let command = ["scripts/bench".to_owned()].into_iter().chain(arguments).collect::<Vec<_>>().join(" ");
        let (seconds, millis) = (Duration::from_secs, Duration::from_millis);
        let (pairs, window, windows, slice, rounds) = match quick {
            true => (seconds(1), seconds(2), 1, millis(700), 1),
            false => (seconds(2), seconds(3), 3, millis(500), 7),
        };
        let (peer_slice, peer_window, peer_rounds) = match quick {
            true => (millis(200), millis(300), 1),
            false => (millis(500), millis(650), 3),
        };
        Ok(Plan {
            command,
            pairs,
            window,
            windows,
            slice,
            rounds,
            peer_slice,
            peer_window,
            peer_rounds,
            sections,
        })
    }

    /// Whether the figures come from a single round.
    pub(crate) fn is_quick(&self) -> bool {
        self.peer_rounds == 1
    }

    /// Whether no section is left out.
    pub(crate) fn is_whole(&self) -> bool {
        self.sections.is_empty()
    }

    /// Whether to run this section. Without any name, all of them run.
    pub(crate) fn includes(&self, section: Section) -> bool {
        self.sections.is_empty() || self.sections.contains(&section)
    }
}
