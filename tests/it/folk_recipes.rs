//! Common recipes for locks, as models: what races in them, shown step by step with two clients on
//! a real server, and that the locks of this crate exclude in the same situation. docs/recipes.md
//! names these tests.

use std::time::Duration;

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use redlatch::{Options, Renewal};

use crate::support::Server;

const KEY: &str = "folk";
/// How long a model's lock lasts, in milliseconds on a client's clock.
const TTL: u64 = 10_000;

/// A client of the recipe "SETNX, and GETSET to take over an expired lock": the value is the time
/// at which the lock expires, on the clock of the client that wrote it.
struct Takeover {
    redis: MultiplexedConnection,
    /// This client's clock.
    now: u64,
}

impl Takeover {
    async fn new(server: &Server, now: u64) -> Takeover {
        Takeover { redis: server.connection().await, now }
    }

    fn end(&self) -> u64 {
        self.now + TTL
    }

    /// The first step: `SETNX`.
    async fn set_if_absent(&mut self) -> bool {
        self.redis.set_nx(KEY, self.end()).await.unwrap()
    }

    /// The second step, if the lock is held: reads its end, and returns it if it has passed.
    async fn read_expired(&mut self) -> Option<u64> {
        let end: Option<u64> = self.redis.get(KEY).await.unwrap();
        end.filter(|end| *end < self.now)
    }

    /// The third step: `GETSET`. The client has the lock if the value is still the one it read.
    async fn take_over(&mut self, read: u64) -> bool {
        let before: Option<u64> = self.redis.getset(KEY, self.end()).await.unwrap();
        before == Some(read)
    }

    /// Releases if the key still has this client's time, so that a successor's lock is spared.
    async fn release(&mut self, mine: u64) -> bool {
        let end: Option<u64> = self.redis.get(KEY).await.unwrap();
        if end != Some(mine) {
            return false;
        }
        self.redis.del(KEY).await.unwrap()
    }
}

#[tokio::test]
async fn takeover_by_timestamp_has_two_holders_if_a_clock_is_ahead() {
    let server = Server::start().await;
    let mut first = Takeover::new(&server, 1_000_000).await;
    let mut ahead = Takeover::new(&server, 1_000_000 + TTL + 1).await;

    assert!(first.set_if_absent().await, "the first client has the lock, for ten more seconds");

    assert!(!ahead.set_if_absent().await);
    let read = ahead.read_expired().await.expect("on this client's clock it has expired");
    assert!(ahead.take_over(read).await, "the second client has it as well");
    assert!(first.now < first.end(), "and the first one's has not expired");
}

#[tokio::test]
async fn takeover_by_timestamp_lets_the_loser_overwrite_the_winners_lock() {
    let server = Server::start().await;
    let mut crashed = Takeover::new(&server, 1_000_000).await;
    assert!(crashed.set_if_absent().await);

    let mut winner = Takeover::new(&server, 1_000_000 + TTL + 1).await;
    let mut loser = Takeover::new(&server, 1_000_000 + TTL + 2).await;
    let (read_by_winner, read_by_loser) = (winner.read_expired().await, loser.read_expired().await);
    assert!(winner.take_over(read_by_winner.unwrap()).await);
    assert!(!loser.take_over(read_by_loser.unwrap()).await, "it does not have the lock …");

    let end: u64 = winner.redis.get(KEY).await.unwrap();
    assert_eq!(end, loser.end(), "… but its time is in the key");
    assert!(!winner.release(winner.end()).await, "so the holder cannot release what it holds");
    assert!(winner.redis.exists::<_, bool>(KEY).await.unwrap(), "and the key has no TTL");
    assert_eq!(winner.redis.pttl::<_, i64>(KEY).await.unwrap(), -1);
}

/// The same situations with a mutex: the server's clock decides, and no client sends its own.
#[tokio::test]
async fn mutex_is_taken_over_by_one_client_after_the_servers_clock() {
    let server = Server::start().await;
    let options = Options::new().ttl(Duration::from_millis(300)).renewal(Renewal::Never);
    let (first, second) = (server.locks_with(options).await, server.locks().await);

    let crashed = first.mutex(KEY).unwrap().lock().await.unwrap();
    assert!(second.mutex(KEY).unwrap().try_lock().await.unwrap().is_none(), "not before its TTL");
    let winner = second.mutex(KEY).unwrap().lock().await.unwrap();
    assert!(crashed.lease().is_lost(), "the first holder knows it");
    assert!(winner.lease().fencing_token() > crashed.lease().fencing_token());

    assert!(crashed.release().await.is_err(), "a late release frees nothing");
    assert!(second.mutex(KEY).unwrap().is_locked().await.unwrap());
    winner.release().await.unwrap();
    assert!(!second.mutex(KEY).unwrap().is_locked().await.unwrap());
}

/// A client of the recipe "a read key and a write key", with scripts, so that no single step races.
struct TwoKeys(MultiplexedConnection);

const READ_KEY: &str = "folk:read";
const WRITE_KEY: &str = "folk:write";

impl TwoKeys {
    async fn new(server: &Server) -> TwoKeys {
        TwoKeys(server.connection().await)
    }

    async fn eval(&mut self, script: &str) -> bool {
        let script = redis::Script::new(script);
        let mut call = script.key(READ_KEY);
        call.key(WRITE_KEY).arg(TTL).invoke_async(&mut self.0).await.unwrap()
    }

    async fn read(&mut self) -> bool {
        self.eval(
            "if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
             redis.call('SET', KEYS[1], 'read', 'PX', ARGV[1])
             return 1",
        )
        .await
    }

    async fn write(&mut self) -> bool {
        self.eval(
            "if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return 0 end
             redis.call('SET', KEYS[2], 'write', 'PX', ARGV[1])
             return 1",
        )
        .await
    }

    async fn release_read(&mut self) -> bool {
        self.0.del(READ_KEY).await.unwrap()
    }
}

#[tokio::test]
async fn read_write_lock_of_two_keys_lets_a_writer_in_beside_a_reader() {
    let server = Server::start().await;
    let [mut first, mut second, mut writer] =
        [TwoKeys::new(&server).await, TwoKeys::new(&server).await, TwoKeys::new(&server).await];

    assert!(first.read().await && second.read().await, "two readers share one key");
    assert!(!writer.write().await);
    assert!(first.release_read().await, "the first reader deletes it");
    assert!(writer.write().await, "and a writer enters, while the second reader reads");
    assert!(!second.release_read().await, "the second reader's lock is gone");
}

#[tokio::test]
async fn read_write_lock_of_two_keys_cannot_keep_a_dead_reader_apart() {
    let server = Server::start().await;
    let [mut living, mut dead] = [TwoKeys::new(&server).await, TwoKeys::new(&server).await];
    assert!(dead.read().await);
    // Most of its time has passed, in which it has crashed.
    let _: bool = dead.0.pexpire(READ_KEY, 1_000).await.unwrap();
    assert!(living.read().await);
    let left: u64 = living.0.pttl(READ_KEY).await.unwrap();
    assert!(left > 1_000, "the living reader renews the dead one: a writer waits for {left} ms");
}

/// The same situation with one hash: each reader has a hold of its own.
#[tokio::test]
async fn rwlock_keeps_a_writer_out_until_the_last_reader_releases() {
    let server = Server::start().await;
    let (one, other) = (server.locks().await, server.locks().await);
    let (first, second) =
        (one.rwlock(KEY).unwrap().read().await.unwrap(), other.rwlock(KEY).unwrap().read().await.unwrap());
    first.release().await.unwrap();
    assert!(one.rwlock(KEY).unwrap().try_write().await.unwrap().is_none(), "the second reader reads");
    second.release().await.unwrap();
    one.rwlock(KEY).unwrap().try_write().await.unwrap().unwrap().release().await.unwrap();
}
