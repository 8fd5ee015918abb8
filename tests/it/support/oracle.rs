//! What the servers themselves say of a lock, read with plain commands: what the crate says is
//! compared with this, and not with itself.

use redlatch::{Name, Owner};

use super::server::count_waiters;
use super::{AnyGuard, AnyLock, Deployment, Server};

/// The holders of one lock on one server: their sides and owners. A mutex and a re-entrant lock
/// have the side "write".
struct Holders {
    sides: Vec<(String, String)>,
    last_token: Option<u64>,
}

impl Holders {
    async fn on(server: &Server, key: &str) -> Holders {
        // On one connection: to connect takes longer than to ask.
        let mut connection = server.connection().await;
        let mut ask = redis::pipe();
        ask.cmd("GET").arg(companion(key, "fence")).cmd("TYPE").arg(key).cmd("TIME");
        let (last_token, kind, (seconds, micros)): (_, String, (u64, u64)) =
            ask.query_async(&mut connection).await.unwrap();
        let sides = match kind.as_str() {
            "string" => {
                let attempt: Option<String> =
                    redis::cmd("GET").arg(key).query_async(&mut connection).await.unwrap();
                attempt.into_iter().map(alone).collect() // it may expire in between
            }
            "hash" => {
                let fields: Vec<(String, String)> =
                    redis::cmd("HGETALL").arg(key).query_async(&mut connection).await.unwrap();
                of_hash(&fields, seconds * 1_000 + micros / 1_000)
            }
            _ => Vec::new(),
        };
        Holders { sides, last_token }
    }

    /// Whether one of them is the holder of this guard. A hold without an owner is known by its
    /// token: the last one granted is its.
    fn include(&self, guard: &AnyGuard) -> bool {
        let token = guard.lease().fencing_token();
        let is_last = || token.is_none_or(|token| self.last_token == Some(token.get()));
        let has = |side: &str, owner: &str| self.sides.iter().any(|it| it.0 == side && it.1 == owner);
        let side = if matches!(guard, AnyGuard::Read(_)) { "read" } else { "write" };
        let owner = match guard {
            AnyGuard::Reentrant(guard) => Some(guard.owner()),
            AnyGuard::Read(guard) => guard.owner(),
            AnyGuard::Write(guard) => guard.owner(),
            AnyGuard::Mutex(_) => None,
        };
        match owner {
            Some(owner) => has(side, &owner.to_string()),
            None => self.sides.iter().any(|it| it.0 == side) && is_last(),
        }
    }
}

fn alone(attempt: String) -> (String, String) {
    ("write".to_owned(), attempt)
}

/// The layouts of `lua/README.md`. What has expired holds nothing.
fn of_hash(fields: &[(String, String)], now: u64) -> Vec<(String, String)> {
    let mode = fields.iter().find(|(field, _)| field == "mode").map_or("", |(_, value)| value);
    let words: Vec<&str> = mode.split(' ').collect();
    match words[..] {
        ["reentrant", ..] => {
            let owners = fields.iter().filter(|(field, _)| field != "mode" && !field.starts_with(':'));
            owners.map(|(owner, _)| alone(owner.clone())).collect()
        }
        ["sole", side, owner, _] => vec![(side.to_owned(), owner.to_owned())],
        ["several"] => {
            let live = |value: &str| {
                value.split(' ').next().is_some_and(|end| end.parse::<u64>().is_ok_and(|end| end > now))
            };
            let live = fields.iter().filter(|(_, value)| live(value));
            live.filter_map(|(field, value)| match field.strip_prefix("read:") {
                Some(owner) => Some(("read".to_owned(), owner.to_owned())),
                None if field == "write" => Some(("write".to_owned(), value.split(' ').nth(1)?.to_owned())),
                None => None,
            })
            .collect()
        }
        // It may expire in between.
        _ if fields.is_empty() => Vec::new(),
        _ => panic!("no lock has this layout: {fields:?}"),
    }
}

fn companion(key: &str, suffix: &str) -> String {
    if key.contains('{') && key.contains('}') {
        format!("{key}:{suffix}")
    } else {
        format!("{{{key}}}:{suffix}")
    }
}

impl Deployment {
    /// Whether more than half of the nodes have the lock held, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        self.more_than_half(lock.key(), |holders| !holders.sides.is_empty()).await
    }

    /// Whether more than half of the nodes have it held by the holder of this guard.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        self.more_than_half(lock.key(), |holders| holders.include(guard)).await
    }

    /// Whether more than half of the nodes have a lock held.
    pub async fn has_holders(&self, name: &Name) -> bool {
        self.more_than_half(name.key(), |holders| !holders.sides.is_empty()).await
    }

    /// Whether more than half of the nodes have it held by this owner, on either side.
    pub async fn has_holder(&self, name: &Name, owner: &Owner) -> bool {
        let owner = owner.to_string();
        self.more_than_half(name.key(), |holders| holders.sides.iter().any(|it| it.1 == owner)).await
    }

    async fn more_than_half(&self, key: &str, is_so: impl Fn(&Holders) -> bool) -> bool {
        let mut count = 0;
        for server in self.homes(key).await {
            count += usize::from(is_so(&Holders::on(server, key).await));
        }
        count >= self.topology().majority()
    }

    /// How many are queued for the lock, on the node that has most.
    pub async fn waiters(&self, lock: &AnyLock) -> u64 {
        let queue = companion(lock.key(), "waiters");
        self.run_at::<u64>(&queue, &count_waiters(&queue)).await.into_iter().max().unwrap_or(0)
    }
}

impl Server {
    /// Whether it has the lock held, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        !Holders::on(self, lock.key()).await.sides.is_empty()
    }

    /// Whether it has the lock held by the holder of this guard.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        Holders::on(self, lock.key()).await.include(guard)
    }

    /// How many are queued for the lock.
    pub async fn queued_for(&self, lock: &AnyLock) -> u64 {
        self.run(&count_waiters(&companion(lock.key(), "waiters"))).await
    }
}
