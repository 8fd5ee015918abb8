//! What all processes of this program on one machine agree on: its file, and a clock.

#[cfg(target_os = "linux")]
use std::ffi::OsStr;
use std::io;
#[cfg(target_os = "linux")]
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::time::{ClockId, clock_gettime};

/// This program. Also after an upgrade has replaced its file, Linux starts the same one.
#[cfg(target_os = "linux")]
pub(crate) fn program() -> io::Result<PathBuf> {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() {
        return Ok(own);
    }
    // Without /proc, the file that this process was started from.
    Ok(OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()).into())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn program() -> io::Result<PathBuf> {
    std::env::current_exe()
}

/// A point in time that all processes of this machine agree on, in nanoseconds: it counts while the
/// machine sleeps.
pub(crate) fn machine_nanos() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = ClockId::Monotonic;
    let time = clock_gettime(clock);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
