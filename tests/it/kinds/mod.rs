//! One kind of lock for each name: a lock of another kind, or the key of another program, is an
//! error and stays as it is.

mod foreign;
mod redisson;
mod tasks;
mod vanished;

use redlatch::{Error, Options, Renewal};

use crate::support::raw::RawLock;
use crate::support::{Kind, Server};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// The sides of one read-write lock share it; any two other kinds do not.
fn share(one: Kind, other: Kind) -> bool {
    let is_rwlock = |kind| matches!(kind, Kind::Read | Kind::Write);
    one == other || is_rwlock(one) && is_rwlock(other)
}

/// Keys as they are, and leases that outlast every test and are never renewed: whatever changes, a
/// request has changed it.
fn unrenewed() -> Options {
    Options::new().prefix("").renewal(Renewal::Never).ttl(std::time::Duration::from_secs(300))
}

/// A key as the server has it.
#[derive(Debug)]
struct Snapshot {
    value: Vec<Vec<u8>>,
    pttl: i64,
}

impl Snapshot {
    async fn of(server: &Server, key: &str) -> Snapshot {
        // The fields of a hash have no order that lasts.
        let value = if server.run::<String>(&["TYPE", key]).await == "hash" {
            let fields: Vec<(Vec<u8>, Vec<u8>)> = server.run(&["HGETALL", key]).await;
            let mut fields: Vec<Vec<u8>> =
                fields.into_iter().map(|(field, value)| [&field[..], b" = ", &value[..]].concat()).collect();
            fields.sort();
            fields
        } else {
            server.run::<Option<Vec<u8>>>(&["DUMP", key]).await.into_iter().collect()
        };
        Snapshot { value, pttl: server.run(&["PTTL", key]).await }
    }

    /// Nothing has changed since, but for the time that has passed.
    async fn assert_unchanged(&self, server: &Server, key: &str, what: &str) {
        let now = Snapshot::of(server, key).await;
        assert!(!now.value.is_empty(), "{key}: {what} has deleted the key");
        let minute = 60_000;
        let pttl_is_as_before = match self.pttl {
            -1 => now.pttl == -1,
            pttl => (pttl - minute..=pttl).contains(&now.pttl),
        };
        assert!(
            self.value == now.value && pttl_is_as_before,
            "{key}: {what} has changed {self:?} to {now:?}"
        );
    }
}

/// No request of another kind has left a waiter behind.
async fn assert_no_waiter(server: &Server, key: &str, what: &str) {
    let lock = RawLock { server, kind: Kind::Mutex, key };
    let waiters = lock.waiters().await;
    assert!(waiters.is_empty(), "{key}: {what} has left {waiters:?}");
}

fn is_wrong_type<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::WrongType { .. }))
}
