//! What is checked: for how long, with which seed, on which servers, under which faults.

use std::time::Duration;

use crate::arguments::Arguments;
use crate::support::Topology;

/// How long a lease lasts here: short, since many faults last longer.
pub const TTL: Duration = Duration::from_millis(2_000);
pub const POLL_CAP: Duration = Duration::from_millis(300);
pub const NODE_TIMEOUT: Duration = Duration::from_millis(400);

/// What a machine that is busy with something else may add.
pub const SLACK: Duration = Duration::from_millis(1_500);

/// Who is hit by a fault. There is one fault of each lane at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// One worker process.
    Workers,
    /// All connections of one worker process.
    Connections,
    /// Servers.
    Servers,
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Workers, Lane::Connections, Lane::Servers];
}

macro_rules! faults {
    ($($fault:ident $name:literal $lane:ident $keeps:literal on $topologies:ident;)*) => {
        /// The classes of faults.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum Fault { $($fault),* }

        impl Fault {
            pub const ALL: &[Fault] = &[$(Fault::$fault),*];

            pub fn name(self) -> &'static str {
                match self { $(Fault::$fault => $name),* }
            }

            pub fn lane(self) -> Lane {
                match self { $(Fault::$fault => Lane::$lane),* }
            }

            /// Whether the servers keep all that they have answered: then nothing may go wrong at all.
            pub fn keeps_state(self) -> bool {
                match self { $(Fault::$fault => $keeps),* }
            }

            /// What is judged while it is done and after it, beside what always is.
            pub fn invariant(self) -> &'static str {
                if !self.keeps_state() {
                    return "bounded loss: its holder knows with the next renewal; tokens grow all the same";
                }
                match self {
                    Fault::WorkerKilled => "waiting: what it held and waited for is free after a ttl",
                    Fault::WorkerStopped | Fault::WorkerBlocked => {
                        "deadline: it does not trust what is over; the resource refuses its late writes"
                    }
                    Fault::Majority => "decision: nothing is granted; false loss: what all nodes had is not lost before its deadline",
                    Fault::Minority | Fault::NodeEmptied | Fault::NodeSetBack => {
                        "decision: the other nodes grant; false loss: what all nodes had is not lost"
                    }
                    _ if self.lane() == Lane::Connections => {
                        "exclusion: no lock is lost, no request counts twice; waiting: all are served after it"
                    }
                    _ => "exclusion, backing: no lock is lost; waiting: all are served after it",
                }
            }

            /// What cannot be done everywhere, and says so.
            pub fn sets_clock(self) -> bool {
                matches!(self, Fault::ClockForward | Fault::ClockBack)
            }

            pub fn is_of(self, topology: Topology) -> bool {
                match self { $(Fault::$fault => $topologies(topology)),* }
            }
        }
    };
}

faults! {
    WorkerKilled "worker-killed" Workers true on all;
    WorkerStopped "worker-stopped" Workers true on all;
    WorkerBlocked "worker-blocked" Workers true on all;
    Reset "reset" Connections true on all;
    HalfOpen "half-open" Connections true on all;
    OneWay "one-way" Connections true on all;
    Slow "slow" Connections true on all;
    Cut "cut" Connections true on all;
    RepliesHeld "replies-held" Connections true on all;
    RequestsHeld "requests-held" Connections true on all;
    RepliesDropped "replies-dropped" Connections true on all;
    ServerStopped "server-stopped" Servers true on all;
    ServerRestarted "server-restarted" Servers true on all;
    ServerEmptied "server-emptied" Servers false on standalone;
    ServerSetBack "server-set-back" Servers false on standalone;
    ScriptFlush "script-flush" Servers true on all;
    ClientKill "client-kill" Servers true on all;
    ClientPause "client-pause" Servers true on all;
    DebugSleep "debug-sleep" Servers true on all;
    BusyScript "busy-script" Servers true on all;
    OutOfMemory "out-of-memory" Servers true on all;
    Eviction "eviction" Servers false on standalone;
    FlushAll "flushall" Servers false on standalone;
    ClockForward "clock-forward" Servers false on standalone;
    ClockBack "clock-back" Servers false on standalone;
    Failover "failover" Servers false on replicated;
    SlotMoved "slot-moved" Servers true on cluster;
    Minority "minority" Servers true on quorum;
    Majority "majority" Servers true on quorum;
    NodeEmptied "node-emptied" Servers true on quorum;
    NodeSetBack "node-set-back" Servers true on quorum;
}

fn all(_: Topology) -> bool {
    true
}

fn standalone(topology: Topology) -> bool {
    topology == Topology::Standalone
}

fn cluster(topology: Topology) -> bool {
    topology == Topology::Cluster
}

fn replicated(topology: Topology) -> bool {
    matches!(topology, Topology::Cluster | Topology::Sentinel)
}

fn quorum(topology: Topology) -> bool {
    topology.nodes() > 1
}

pub const TOPOLOGIES: [(Topology, &str); 5] = [
    (Topology::Standalone, "standalone"),
    (Topology::Quorum3, "quorum3"),
    (Topology::Cluster, "cluster"),
    (Topology::Sentinel, "sentinel"),
    (Topology::Quorum5, "quorum5"),
];

pub fn topology_name(topology: Topology) -> &'static str {
    TOPOLOGIES.iter().find(|(one, _)| *one == topology).expect("each has a name").1
}

pub fn topology_named(name: &str) -> Option<Topology> {
    TOPOLOGIES.iter().find(|(_, one)| *one == name).map(|(topology, _)| *topology)
}

/// One run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seconds: u64,
    pub seed: u64,
    pub topology: Topology,
    pub faults: Vec<Fault>,
    /// One of so many holds lasts longer than a lease.
    pub linger: u64,
}

impl Plan {
    /// The topology is the seed's turn, and the faults are all that there are for it, unless they are given.
    pub fn new(arguments: &Arguments, seed: u64) -> Plan {
        let Arguments { seconds, topology, ref faults, linger, .. } = *arguments;
        let turn = usize::try_from(seed).unwrap_or(0) % TOPOLOGIES.len();
        let topology = topology.unwrap_or(TOPOLOGIES[turn].0);
        // A clock that steps back beside a counter that is lost may set tokens back, as the docs say: not both in one run.
        let clocks = (seed / TOPOLOGIES.len() as u64).is_multiple_of(2);
        let chosen = |fault: &&Fault| {
            let may = fault.keeps_state() || topology != Topology::Standalone || fault.sets_clock() == clocks;
            fault.is_of(topology) && if faults.is_empty() { may } else { faults.contains(fault) }
        };
        Plan { seconds, seed, topology, linger, faults: Fault::ALL.iter().filter(chosen).copied().collect() }
    }

    pub fn lane(&self, lane: Lane) -> Vec<Fault> {
        self.faults.iter().copied().filter(|fault| fault.lane() == lane).collect()
    }

    /// The command that does the same again.
    pub fn replay(&self, given: &[Fault]) -> String {
        let mut line = format!(
            "scripts/check --seed {} --seconds {} --topology {} --linger {}",
            self.seed,
            self.seconds,
            topology_name(self.topology),
            self.linger
        );
        for fault in given {
            line += &format!(" --fault {}", fault.name());
        }
        line
    }
}

/// What a worker process is told when it starts.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Duty {
    pub number: u32,
    pub seed: u64,
    pub topology: String,
    /// Where it comes in: at its own proxy.
    pub host: String,
    pub ports: Vec<u16>,
    /// The resources that the locks protect.
    pub resource: String,
    pub history: std::path::PathBuf,
    pub pushed: bool,
    pub linger: u64,
}
