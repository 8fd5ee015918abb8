//! Many readers: the cost of each, and the duration of scripts beside them.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redlatch::{Mode, Owner, Renewal, RwLock};
use tokio::task::JoinSet;

use super::{READ_LANE, client, queued};
use crate::support::{Oracle, Server, eventually, patient, soon};

/// A turn that lasts for the whole test.
const LONG: Duration = Duration::from_secs(10);

/// A script with a fixed amount of work. It takes about 3 ms, half of what a script may take.
const YARDSTICK: &str = "
    redis.call('ZADD', KEYS[1], 1, 'a', 2, 'b')
    for _ = 1, 1600 do redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES') end
    redis.call('DEL', KEYS[1])";

/// Acquires this many read holds without owners.
async fn read_by_many(lock: &RwLock, readers: usize) -> Vec<redlatch::RwLockReadGuard> {
    let mut guards = Vec::with_capacity(readers);
    // In batches: on a busy machine, requests of all at once would exceed their timeout.
    while guards.len() < readers {
        let mut tasks = JoinSet::new();
        for _ in guards.len()..readers.min(guards.len() + 500) {
            let lock = lock.clone();
            tasks.spawn(async move { lock.read().await.unwrap() });
        }
        guards.extend(tasks.join_all().await);
    }
    guards
}

/// The server's average time per script since the last reset of its statistics, in microseconds.
async fn script_time(server: &Server) -> f64 {
    let stats: String = server.run(&["INFO", "commandstats"]).await;
    let number = |line: &str, name: &str| -> f64 {
        line.split_once(name).unwrap().1.split(',').next().unwrap().parse().unwrap()
    };
    let lines: Vec<&str> = stats.lines().filter(|line| line.starts_with("cmdstat_evalsha:")).collect();
    number(lines[0], "usec=") / number(lines[0], "calls=")
}

const READERS: usize = 9_990;

/// Reads that join a hold wait for nothing. A task that does nothing else lets the others of its
/// thread run: after 32 reads, not after the 128 that tokio would allow.
#[tokio::test]
async fn rwlock_standalone_tasks_that_only_read_let_others_run() {
    const READS: usize = 1_280;
    let server = Server::start().await;
    let lock = server.locks_with(patient().local_turn(LONG)).await.rwlock("rw").unwrap();
    let first = lock.read().await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let other = tokio::spawn({
        let runs = Arc::clone(&runs);
        async move {
            loop {
                runs.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    });
    for _ in 0..READS {
        lock.read().await.unwrap().release().await.unwrap();
    }
    other.abort();
    let runs = runs.load(Ordering::Relaxed);
    assert!(runs >= READS / 40, "the other task ran {runs} times beside {READS} reads");
    first.release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

/// A read and its release take the server the same time beside one reader and beside ten thousand.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_read_costs_the_same_beside_ten_thousand_readers() {
    const PAIRS: usize = 100;
    let server = Server::start().await;
    // A long TTL: renewals would be counted.
    let lock = client(&server, patient().read_ttl(Duration::from_secs(3_600))).await;
    let long = patient().read_ttl(Duration::from_secs(3_600));
    let others = server.locks_with(long.renewal(Renewal::Never)).await;
    let (alone, shared) = (others.rwlock("alone").unwrap(), others.rwlock("rw").unwrap());
    let guards = read_by_many(&lock, READERS).await;
    let one = alone.read().await.unwrap();
    assert_eq!(server.lock_state(lock.name()).await.readers.len(), READERS);
    // Alternating, so that other load affects both measurements.
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..31 {
        for (lock, costs) in [&alone, &shared].into_iter().zip(&mut costs) {
            server.run::<()>(&["CONFIG", "RESETSTAT"]).await;
            for _ in 0..PAIRS {
                lock.read().await.unwrap().release().await.unwrap();
            }
            costs.push(script_time(&server).await);
        }
    }
    let [alone_us, shared_us] = costs.map(|mut costs| {
        costs.sort_by(f64::total_cmp);
        costs[costs.len() / 2]
    });
    println!("server time of a script beside 1 reader {alone_us:.2} us, beside {READERS} {shared_us:.2} us");
    assert!(shared_us < alone_us * 1.3, "{shared_us} us beside {READERS} readers, {alone_us} us beside one");
    one.release().await.unwrap();
    drop(guards);
    eventually("all readers are released", || async {
        server.lock_state(lock.name()).await.readers.is_empty()
    })
    .await;
    drop((lock, alone, shared, others));
    server.assert_nothing_left().await;
}

/// No script takes longer than 5 ms beside ten thousand readers: not a writer's attempt, not the
/// removal of dead readers, not an inspection, not `force`. The server's CPU time counts, beside
/// that of a yardstick in the same run, which takes about 3 ms: the median of five runs. The bound
/// is about four times as wide; a script that visits all readers takes longer.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_scripts_are_short_beside_ten_thousand_readers() {
    let server =
        Server::start_with(&["--slowlog-log-slower-than", "200", "--slowlog-max-len", "100000"]).await;
    let mut ratios: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..5 {
        let yardstick = yardstick(&server).await as f64;
        let lock = client(&server, patient().read_ttl(Duration::from_secs(3_600))).await;
        let other = client(&server, patient()).await;
        let owner = Owner::new();
        let one = lock.with_owner(&owner).read().await.unwrap();
        let guards = read_by_many(&lock, READERS).await;
        let mut note = |what, micros: u64| {
            ratios.entry(what).or_default().push(micros as f64 / yardstick);
        };

        let took = cpu_time(&server, async {
            assert!(other.try_write().await.unwrap().is_none());
            assert!(other.write_timeout(Duration::from_millis(300)).await.is_err());
        });
        note("a writer finds them", took.await);
        let took = cpu_time(&server, async {
            let seen = lock.inspect().await.unwrap();
            assert_eq!(
                (seen.readers.len(), seen.reader_count as usize),
                (500, READERS + 1),
                "the inspection lists the first 500"
            );
        });
        note("listed", took.await);

        for guard in guards {
            guard.leak();
        }
        expire_all_but(&server, &owner.to_string()).await;
        // Many short scripts: the longest counts.
        let took = longest(&server, async {
            let writer = queued(&server, &lock, {
                let other = other.clone();
                async move { other.write().await }
            })
            .await;
            one.release().await.unwrap();
            soon("the writer acquires past the dead readers", writer)
                .await
                .unwrap()
                .unwrap()
                .release()
                .await
                .unwrap();
        });
        note("a writer sweeps the dead", took.await);
        assert_eq!(server.run::<u64>(&["EXISTS", "lock:rw"]).await, 0, "no dead reader is left");

        for unknown in [false, true] {
            let guards = read_by_many(&lock, READERS).await;
            if unknown {
                let _: i64 = server.run(&["HSET", "lock:rw", "later", "1"]).await;
            }
            let took = cpu_time(&server, async { assert!(lock.force_release_read().await.unwrap()) });
            note(if unknown { "force beside unknown fields" } else { "force" }, took.await);
            assert!(other.try_write().await.unwrap().is_some());
            guards.into_iter().for_each(redlatch::RwLockReadGuard::leak);
        }
        eventually("the lock is free", || async { server.lock_state(lock.name()).await.mode == Mode::Free })
            .await;
        let _: i64 = server.run(&["DEL", "lock:rw"]).await;
        drop((lock, other));
    }
    for (what, mut ratios) in ratios {
        ratios.sort_by(f64::total_cmp);
        println!("FIG {what}: {ratios:.2?} of the yardstick");
        assert!(ratios[ratios.len() / 2] < 7.0, "{what}: {ratios:.2?} of the yardstick");
    }
    server.assert_nothing_left().await;
}

/// The server's CPU time during the work, in microseconds.
async fn cpu_time(server: &Server, work: impl Future<Output = ()>) -> u64 {
    let spent = async || {
        let info: String = server.run(&["INFO", "cpu"]).await;
        let seconds = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok());
        ((seconds("used_cpu_user:").unwrap() + seconds("used_cpu_sys:").unwrap()) * 1e6) as u64
    };
    let before = spent().await;
    work.await;
    spent().await - before
}

/// How long the server's main thread has waited for a core, in microseconds.
fn waited(server: &Server) -> u64 {
    let process = server.process_id();
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{process}/schedstat")).unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() / 1000
}

/// The longest time that a script took during the work, in microseconds, by the server's slow log.
/// The time for which the server waited for a core meanwhile is subtracted.
async fn longest(server: &Server, work: impl Future<Output = ()>) -> u64 {
    server.run::<()>(&["SLOWLOG", "RESET"]).await;
    let before = waited(server);
    work.await;
    let waited = waited(server) - before;
    let slow: Vec<(u64, u64, u64, Vec<redis::Value>, String, String)> =
        server.run(&["SLOWLOG", "GET", "100000"]).await;
    let is_script = |words: &[redis::Value]| matches!(&words[0], redis::Value::BulkString(word) if word.starts_with(b"EVAL"));
    let longest = slow.iter().filter(|entry| is_script(&entry.3)).map(|entry| entry.2).max().unwrap_or(0);
    longest.saturating_sub(waited)
}

/// The processor time that the yardstick takes, in microseconds.
async fn yardstick(server: &Server) -> u64 {
    cpu_time(server, async { server.run::<()>(&["EVAL", YARDSTICK, "1", "yardstick"]).await }).await
}

/// Moves the expiry of all other readers into the past.
async fn expire_all_but(server: &Server, owner: &str) {
    let script = "
        for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
          if string.sub(field, 1, 5) == 'read:' and field ~= 'read:' .. ARGV[1] then
            local hold = redis.call('HGET', KEYS[1], field)
            redis.call('HSET', KEYS[1], field, (string.gsub(hold, '^%d+', '1')))
          end
        end";
    let _: redis::Value = server.run(&["EVAL", script, "1", "lock:rw", owner]).await;
}

/// Thousands of dead waiters, of one client or of many: no script is slow because of them.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_release_is_short_past_thousands_of_dead_waiters() {
    let server =
        Server::start_with(&["--slowlog-log-slower-than", "200", "--slowlog-max-len", "100000"]).await;
    let lock = client(&server, patient()).await;
    // Dead by their age, or because their channel has no subscriber.
    for (is_old, owners_differ) in [(false, true), (false, false), (true, true), (true, false)] {
        for channels_differ in [false, true] {
            let mut ratios = Vec::new();
            for _ in 0..3 {
                let writing = lock.write().await.unwrap();
                let mut queue = redis::pipe();
                let now = if is_old { 1_000_000_000_000_000 } else { server.time().await };
                for number in 0..9_990 {
                    let owner = if owners_differ { number } else { 7 };
                    let channel = if channels_differ { number } else { 7 };
                    let dead = format!("{number:032x} read 60000 lock:wake:{channel:032x} o{owner} 255");
                    queue.zadd("{lock:rw}:waiters", dead, now - READ_LANE + number);
                }
                queue.exec_async(&mut server.connection().await).await.unwrap();
                let _: i64 = server.run(&["PEXPIRE", "{lock:rw}:waiters", "60000"]).await;
                let took = longest(&server, async {
                    writing.release().await.unwrap();
                    let reading =
                        soon("the reader acquires past the dead waiters", lock.read()).await.unwrap();
                    reading.release().await.unwrap();
                });
                let took = took.await;
                ratios.push(took as f64 / yardstick(&server).await as f64);
                let _: i64 = server.run(&["DEL", "{lock:rw}:waiters"]).await;
            }
            let case =
                format!("old {is_old}, owners differ {owners_differ}, channels differ {channels_differ}");
            ratios.sort_by(f64::total_cmp);
            println!("FIG {case}: {ratios:.2?} of the yardstick");
            assert!(ratios[1] < 5.0, "{case}: {ratios:.2?} of the yardstick");
        }
    }
    drop(lock);
    server.assert_nothing_left().await;
}
