//! What clients cost.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The CPU time that this process has used so far.
pub(crate) fn client_cpu() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec.try_into().unwrap_or(0))
}
