//! Each name belongs to one kind of lock: calls on a lock of another kind, or on the key of another
//! program, return an error and change nothing.

mod concurrent_tasks;
mod deleted_keys;
mod existing_keys;
mod redisson;

use redlatch::{Error, Options, Renewal};

use crate::support::raw::RawLock;
use crate::support::{KINDS, Kind, Server};

/// Whether two kinds may use one name: only the two sides of a read-write lock may.
fn share(one: Kind, other: Kind) -> bool {
    let is_rwlock = |kind| matches!(kind, Kind::Read | Kind::Write);
    one == other || is_rwlock(one) && is_rwlock(other)
}

/// Keys without a prefix, and leases that outlast every test without renewals: only a request can
/// change a key.
fn unrenewed() -> Options {
    Options::new().prefix("").renewal(Renewal::Never).ttl(std::time::Duration::from_secs(300))
}

/// The value and the TTL of a key on the server.
#[derive(Debug)]
struct Snapshot {
    value: Vec<Vec<u8>>,
    pttl: i64,
}

impl Snapshot {
    async fn of(server: &Server, key: &str) -> Snapshot {
        // The order of a hash's fields may change.
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

    /// Checks that the key has not changed since, except that its TTL has decreased.
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

/// Checks that no request of another kind has left a waiter.
async fn assert_no_waiter(server: &Server, key: &str, what: &str) {
    let lock = RawLock { server, kind: Kind::Mutex, key };
    let waiters = lock.waiters().await;
    assert!(waiters.is_empty(), "{key}: {what} has left {waiters:?}");
}

fn is_wrong_type<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::WrongType { .. }))
}
