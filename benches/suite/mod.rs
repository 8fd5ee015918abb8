//! The parts of the bench: a server, what is measured on it, and the report.

pub(crate) mod beside_rslock;
pub(crate) mod client_cpu;
pub(crate) mod gate;
pub(crate) mod handover;
pub(crate) mod limits;
pub(crate) mod markdown;
pub(crate) mod page;
pub(crate) mod page_pairs;
pub(crate) mod pairs;
pub(crate) mod peers;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod plot;
pub(crate) mod processes;
pub(crate) mod program;
pub(crate) mod reads;
pub(crate) mod record;
pub(crate) mod renewal;
pub(crate) mod report;
pub(crate) mod samples;
pub(crate) mod scale;
pub(crate) mod server;
pub(crate) mod server_cpu;
pub(crate) mod shards;
pub(crate) mod topologies;
pub(crate) mod turns;
pub(crate) mod work;

/// Every error ends the bench: a figure from a run with errors means nothing.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
