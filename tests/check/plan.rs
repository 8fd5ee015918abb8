//! The plan of a run: duration, seed, topology and faults.

use std::time::Duration;

use crate::arguments::Arguments;
use crate::support::Topology;

/// The TTL of all leases: short, so that many faults outlast it.
pub const TTL: Duration = Duration::from_millis(2_000);
/// For how long a client trusts a lease: the TTL less the drift.
pub const TRUSTED: Duration = Duration::from_millis(1_978);
/// Longer than most holds, so that many are passed on.
pub const LOCAL_TURN: Duration = Duration::from_millis(50);
pub const POLL_CAP: Duration = Duration::from_millis(300);
pub const NODE_TIMEOUT: Duration = Duration::from_millis(400);

/// The delay that other work on the machine may add.
pub const SLACK: Duration = Duration::from_millis(1_500);

/// The target of a fault. One fault of each lane is active at a time.
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

            /// Whether the servers keep all that they have confirmed: then no lock may be lost.
            pub fn keeps_state(self) -> bool {
                match self { $(Fault::$fault => $keeps),* }
            }

            /// The rules to read for this fault, as in the table of docs/testing.md. All rules are
            /// judged under every fault.
            pub fn invariant(self) -> &'static str {
                if !self.keeps_state() {
                    return "bounded loss: the holder learns of it with the next renewal; tokens still grow";
                }
                match self {
                    Fault::WorkerKilled => "waiting: its locks and places are free after a TTL",
                    Fault::WorkerStopped | Fault::WorkerBlocked => {
                        "deadline: it does not trust expired leases; the resource refuses its late writes"
                    }
                    Fault::Majority => "decision: nothing is granted; false loss: leases on all nodes are not lost before their deadline",
                    Fault::Minority | Fault::NodeEmptied | Fault::NodeSetBack => {
                        "decision: the other nodes grant; false loss: leases on all nodes are not lost"
                    }
                    _ if self.lane() == Lane::Connections => {
                        "exclusion: no lock is lost, no request counts twice; waiting: every waiter is served afterwards"
                    }
                    _ => "exclusion, backing: no lock is lost; waiting: every waiter is served afterwards",
                }
            }

            /// Whether the fault steps a clock, which requires a C compiler.
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

/// The plan of one run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seconds: u64,
    pub seed: u64,
    pub topology: Topology,
    pub faults: Vec<Fault>,
    /// One of this many holds lasts longer than a lease.
    pub linger: u64,
    /// One of this many requests is for several locks.
    pub sets: u64,
}

impl Plan {
    /// Without arguments, the seed selects the topology, and all of its faults are planned.
    pub fn new(arguments: &Arguments, seed: u64) -> Plan {
        let Arguments { seconds, topology, ref faults, linger, sets, .. } = *arguments;
        let turn = usize::try_from(seed).unwrap_or(0) % TOPOLOGIES.len();
        let topology = topology.unwrap_or(TOPOLOGIES[turn].0);
        // A clock that steps back and a lost counter together may set tokens back, as documented.
        // So a run has one or the other.
        let clocks = (seed / TOPOLOGIES.len() as u64).is_multiple_of(2);
        let chosen = |fault: &&Fault| {
            let may = fault.keeps_state() || topology != Topology::Standalone || fault.sets_clock() == clocks;
            fault.is_of(topology) && if faults.is_empty() { may } else { faults.contains(fault) }
        };
        let faults = Fault::ALL.iter().filter(chosen).copied().collect();
        Plan { seconds, seed, topology, linger, sets, faults }
    }

    pub fn lane(&self, lane: Lane) -> Vec<Fault> {
        self.faults.iter().copied().filter(|fault| fault.lane() == lane).collect()
    }

    /// The command that repeats the run.
    pub fn replay(&self, given: &[Fault]) -> String {
        let mut line = format!(
            "scripts/check --seed {} --seconds {} --topology {} --linger {} --sets {}",
            self.seed,
            self.seconds,
            topology_name(self.topology),
            self.linger,
            self.sets
        );
        for fault in given {
            line += &format!(" --fault {}", fault.name());
        }
        line
    }
}

/// The settings of a worker process, passed to it as its argument.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct WorkerSettings {
    pub number: u32,
    pub seed: u64,
    pub topology: String,
    /// The address of the worker's own proxy.
    pub host: String,
    pub ports: Vec<u16>,
    /// The URL of the server with the resources that the locks protect.
    pub resource: String,
    pub history: std::path::PathBuf,
    /// Whether waiters are notified; otherwise they poll.
    pub is_notified: bool,
    pub linger: u64,
    pub sets: u64,
}
