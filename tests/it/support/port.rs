//! Ports for servers; the tests inside the library use them as well.

use std::net::TcpListener;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of ports to try: a port may be taken between finding and using it.
pub const TRIES: usize = 20;

/// A port that is free together with the port 10,000 above it, which a cluster's server uses for
/// its bus. Both are below the ephemeral ports, so no connection takes them while a server
/// restarts.
pub fn free_port() -> u16 {
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
        AtomicU32::new(clock ^ std::process::id())
    });
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let port = 10_000 + (NEXT.fetch_add(1, Ordering::Relaxed) % 10_000) as u16;
        if is_free(port) && is_free(port + 10_000) {
            return port;
        }
    }
}
