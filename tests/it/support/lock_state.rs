//! A lock's state on the servers, read with plain commands according to `lua/README.md`. Tests
//! compare the crate's reports with this, and not with the crate itself.

use std::cmp::Reverse;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redlatch::{Mode, Name};

use super::server::count_waiters;
use super::{AnyGuard, Deployment, Server, Setup};

/// The holds of one owner on one side. A mutex and a re-entrant lock have the side "write".
#[derive(Clone, Debug)]
pub struct Hold {
    pub side: String,
    /// The owner; the attempt's id, if there is no owner.
    pub owner: String,
    pub count: u64,
    /// The time until the server expires it, unless it is renewed.
    pub remaining: Duration,
}

/// One lock on one server, or the state that a majority of the servers agrees on. Expired holds are
/// left out.
#[derive(Debug)]
pub struct LockState {
    pub mode: Mode,
    pub writer: Option<Hold>,
    pub readers: Vec<Hold>,
    pub waiting_writers: u64,
    pub waiting_readers: u64,
    /// The last fencing token that was granted.
    pub last_token: Option<u64>,
}

impl LockState {
    /// The state on the server of this connection.
    pub async fn on(connection: &mut MultiplexedConnection, key: &str) -> LockState {
        let queue = companion(key, "waiters");
        // A counter key with a value of another type has no token.
        let token = redis::cmd("GET").arg(companion(key, "fence")).query_async(connection).await;
        let token: Option<String> = token.unwrap_or(None);
        let mut ask = redis::pipe();
        ask.cmd("TYPE").arg(key);
        ask.cmd("ZCOUNT").arg(&count_waiters(&queue)[1..]);
        ask.cmd("ZCOUNT").arg(&[&queue, "-inf", "(0"]);
        let (kind, waiting, waiting_readers): (String, u64, u64) = ask.query_async(connection).await.unwrap();
        let holds = match kind.as_str() {
            "string" => holds_of_string(connection, key).await,
            "hash" => holds_of_hash(connection, key).await,
            _ => Vec::new(),
        };
        let last_token = token.and_then(|token| token.parse().ok());
        LockState::of(holds, waiting - waiting_readers, waiting_readers, last_token)
    }

    fn of(
        holds: Vec<Hold>,
        waiting_writers: u64,
        waiting_readers: u64,
        last_token: Option<u64>,
    ) -> LockState {
        let (mut writers, readers): (Vec<_>, Vec<_>) =
            holds.into_iter().partition(|hold| hold.side == "write");
        assert!(writers.len() <= 1, "one lock has several writers: {writers:?}");
        let writer = writers.pop();
        let mode = match (&writer, readers.is_empty()) {
            (Some(_), _) => Mode::Write,
            (None, false) => Mode::Read,
            (None, true) => Mode::Free,
        };
        LockState { mode, writer, readers, waiting_writers, waiting_readers, last_token }
    }

    pub fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.writer.iter().chain(&self.readers)
    }

    pub fn is_held(&self) -> bool {
        self.holds().next().is_some()
    }

    /// The waiters of both sides.
    pub fn waiters(&self) -> u64 {
        self.waiting_writers + self.waiting_readers
    }

    /// Whether one of the holds is this guard's. A hold without an owner is identified by its
    /// token, which is the last one granted.
    pub fn is_held_by(&self, guard: &AnyGuard) -> bool {
        let token = guard.lease().fencing_token();
        let is_last = || token.is_none_or(|token| self.last_token == Some(token.get()));
        let side = if matches!(guard, AnyGuard::Read(_)) { "read" } else { "write" };
        let owner = match guard {
            AnyGuard::Reentrant(guard) => Some(guard.owner()),
            AnyGuard::Read(guard) => guard.owner(),
            AnyGuard::Write(guard) => guard.owner(),
            AnyGuard::Mutex(_) => None,
        };
        let mut holds = self.holds().filter(|hold| hold.side == side);
        match owner {
            Some(owner) => holds.any(|hold| hold.owner == owner.to_string()),
            None => holds.next().is_some() && is_last(),
        }
    }

    /// The holds that a majority of these states has, with the count and the remaining time that a
    /// majority reaches; of the other fields, the largest value.
    fn agreed(states: &[LockState], majority: usize) -> LockState {
        let mut agreed: Vec<Hold> = Vec::new();
        for hold in states.iter().flat_map(LockState::holds) {
            let is_same = |other: &Hold| (&other.side, &other.owner) == (&hold.side, &hold.owner);
            let same: Vec<&Hold> =
                states.iter().filter_map(|state| state.holds().find(|one| is_same(one))).collect();
            if same.len() < majority || agreed.iter().any(is_same) {
                continue;
            }
            let mut counts: Vec<u64> = same.iter().map(|one| one.count).collect();
            counts.sort_unstable_by_key(|count| Reverse(*count));
            let mut spans: Vec<Duration> = same.iter().map(|one| one.remaining).collect();
            spans.sort_unstable_by_key(|span| Reverse(*span));
            agreed.push(Hold { count: counts[majority - 1], remaining: spans[majority - 1], ..hold.clone() });
        }
        let most = |of: fn(&LockState) -> u64| states.iter().map(of).max().unwrap_or(0);
        LockState::of(
            agreed,
            most(|state| state.waiting_writers),
            most(|state| state.waiting_readers),
            states.iter().filter_map(|state| state.last_token).max(),
        )
    }
}

/// A mutex: the value of its key is the attempt's id.
async fn holds_of_string(connection: &mut MultiplexedConnection, key: &str) -> Vec<Hold> {
    let (attempt, pttl): (Option<String>, i64) =
        redis::pipe().cmd("GET").arg(key).cmd("PTTL").arg(key).query_async(connection).await.unwrap();
    // The hold may expire between the two requests.
    attempt.map(|attempt| hold("write", &attempt, 1, pttl)).into_iter().collect()
}

async fn holds_of_hash(connection: &mut MultiplexedConnection, key: &str) -> Vec<Hold> {
    let mut ask = redis::pipe();
    ask.cmd("HGETALL").arg(key).cmd("PTTL").arg(key).cmd("TIME");
    let (fields, pttl, (seconds, micros)): (Vec<(String, String)>, i64, (i64, i64)) =
        ask.query_async(connection).await.unwrap();
    let now = seconds * 1_000 + micros / 1_000;
    let mode = fields.iter().find(|(field, _)| field == "mode").map_or("", |(_, value)| value);
    let words: Vec<&str> = mode.split(' ').collect();
    match words[..] {
        ["reentrant", ..] => {
            let owners = fields.iter().filter(|(field, _)| field != "mode" && !field.starts_with(':'));
            owners.map(|(owner, count)| hold("write", owner, count.parse().unwrap(), pttl)).collect()
        }
        ["sole", side, owner, _] => vec![hold(side, owner, 1, pttl)],
        ["several"] => fields.iter().filter_map(|(field, value)| one_of_several(field, value, now)).collect(),
        // The hold may expire between the two requests.
        _ if fields.is_empty() => Vec::new(),
        _ => panic!("no lock has this layout: {fields:?}"),
    }
}

/// Parses a field of a read-write lock: `read:<owner>` has an expiry time and the attempts; `write`
/// has an expiry time, the owner and the attempts.
fn one_of_several(field: &str, value: &str, now: i64) -> Option<Hold> {
    let words: Vec<&str> = value.split(' ').collect();
    let left = || words[0].parse::<i64>().ok().map(|end| end - now).filter(|left| *left > 0);
    if let Some(owner) = field.strip_prefix("read:") {
        return Some(hold("read", owner, words.len() - 1, left()?));
    }
    (field == "write").then(left)?.map(|left| hold("write", words[1], words.len() - 2, left))
}

fn hold(side: &str, owner: &str, count: usize, remaining_ms: i64) -> Hold {
    Hold {
        side: side.to_owned(),
        owner: owner.to_owned(),
        count: count as u64,
        remaining: Duration::from_millis(u64::try_from(remaining_ms).unwrap_or(0)),
    }
}

pub(super) fn companion(key: &str, suffix: &str) -> String {
    if key.contains('{') && key.contains('}') {
        format!("{key}:{suffix}")
    } else {
        format!("{{{key}}}:{suffix}")
    }
}

/// Servers that can be asked for a lock's state.
pub trait Oracle {
    async fn lock_state(&self, name: &Name) -> LockState;
}

impl Oracle for Server {
    async fn lock_state(&self, name: &Name) -> LockState {
        LockState::on(&mut self.connection().await, name.key()).await
    }
}

impl Oracle for Deployment {
    /// The state that a majority of the nodes has.
    async fn lock_state(&self, name: &Name) -> LockState {
        let mut states = Vec::new();
        for server in self.homes(name.key()).await {
            states.push(server.lock_state(name).await);
        }
        LockState::agreed(&states, self.topology().majority())
    }
}

impl Setup {
    /// The state that a majority of the nodes has.
    pub async fn state_of(&self, name: &Name) -> LockState {
        self.deployment.lock_state(name).await
    }
}
