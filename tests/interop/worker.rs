//! The Rust worker of `tests/interop/scenes.py` and `others.py`, with the commands that
//! `lua/clients/README.md` describes: a JSON object per line, and a line for each answer.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};

use redlatch::redis::{self, Client, Cmd, aio::ConnectionLike, cluster::ClusterClient};
use redlatch::{Error, Locks, Options, Owner};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::{sync::Mutex, time::timeout};

type Outcome<T = Value> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

enum Guard {
    Mutex(redlatch::MutexGuard),
    Reentrant(redlatch::ReentrantGuard),
    Read(redlatch::RwLockReadGuard),
    Write(redlatch::RwLockWriteGuard),
}

macro_rules! each {
    ($guard:expr, $inner:ident => $call:expr) => {
        match $guard {
            Guard::Mutex($inner) => $call,
            Guard::Reentrant($inner) => $call,
            Guard::Read($inner) => $call,
            Guard::Write($inner) => $call,
        }
    };
}

/// The client, and the command that opened it.
static OPENED: OnceLock<(Locks, Value)> = OnceLock::new();
static GUARDS: LazyLock<Mutex<HashMap<String, Guard>>> = LazyLock::new(Mutex::default);

/// Returns the guard and its fencing token. A limit of zero means one try.
async fn acquire(locks: &Locks, command: &Value, limit: Duration) -> Outcome<(Guard, u64)> {
    let ttl = Duration::from_millis(command["ttl_ms"].as_u64().unwrap_or(3000));
    let mut options = Options::new().ttl(ttl);
    if let Some(cap) = command["poll_cap_ms"].as_u64() {
        options = options.poll_cap(Duration::from_millis(cap));
    }
    let (locks, name) = (locks.with_options(options)?, text(command, "name"));
    let owner = Owner::from_word(text(command, "owner")).ok();
    let reentrant = locks.reentrant(name, &owner.clone().unwrap_or_else(Owner::new))?;
    let rwlock = locks.rwlock(name)?;
    let rwlock = owner.map_or_else(|| rwlock.clone(), |owner| rwlock.with_owner(&owner));
    let guard = match text(command, "kind") {
        "mutex" => Guard::Mutex(locks.mutex(name)?.lock_timeout(limit).await?),
        "reentrant" => Guard::Reentrant(reentrant.lock_timeout(limit).await?),
        "read" => Guard::Read(rwlock.read_timeout(limit).await?),
        _ => Guard::Write(rwlock.write_timeout(limit).await?),
    };
    let token = each!(&guard, guard => guard.lease()).fencing_token().ok_or("no token")?.get();
    Ok((guard, token))
}

/// Increments a number by GET and SET under the lock: a second holder would lose increments.
async fn count((locks, opened): &(Locks, Value), command: &Value) -> Outcome {
    let (url, key) = (url(opened), text(command, "key"));
    let mut redis: Box<dyn ConnectionLike + Send> = match text(opened, "topology") {
        "cluster" => Box::new(ClusterClient::new([url])?.get_async_connection().await?),
        _ => {
            let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
            Box::new(Client::open(url)?.get_multiplexed_async_connection_with_config(&patient).await?)
        }
    };
    let (mut increments, mut longest_ms, mut last, mut is_ascending) = (0, 0, 0, true);
    let end = Instant::now() + Duration::from_secs_f64(command["seconds"].as_f64().unwrap_or(1.0));
    while Instant::now() < end {
        let start = Instant::now();
        let (guard, token) = acquire(locks, command, Duration::from_secs(10)).await?;
        longest_ms = start.elapsed().as_millis().max(longest_ms);
        is_ascending &= token > std::mem::replace(&mut last, token);
        let number: Option<u64> = redis::from_redis_value(redis.req_packed_command(&Cmd::get(key)).await?)?;
        redis.req_packed_command(&Cmd::set(key, number.unwrap_or(0) + 1)).await?;
        each!(guard, guard => guard.release().await)?;
        increments += 1;
    }
    Ok(json!({ "increments": increments, "longest_ms": longest_ms, "tokens_ascending": is_ascending }))
}

async fn run(command: &Value) -> Outcome {
    let (verb, handle, opened) = (text(command, "do"), text(command, "as"), OPENED.get().ok_or("not open"));
    let limit = Duration::from_millis(command["limit_ms"].as_u64().unwrap_or(5000));
    let mut guards = GUARDS.lock().await;
    let lease = guards.get(handle).map(|guard| each!(guard, guard => guard.lease().clone()));
    let guard = if matches!(verb, "release" | "downgrade") { guards.remove(handle) } else { None };
    drop(guards);
    match (verb, guard, lease) {
        ("open", ..) => {
            let builder = match (text(command, "topology"), url(command)) {
                ("cluster", url) => Locks::builder().cluster([url]),
                ("" | "server", url) => Locks::builder().server(url),
                (name, url) => Locks::builder().sentinel([url], name.trim_start_matches("sentinel:")),
            };
            let options = Options::new().prefix(command["prefix"].as_str().unwrap_or("lock:"));
            OPENED.set((builder.options(options).connect().await?, command.clone())).map_err(|_| "open")?;
        }
        ("acquire", ..) => {
            let (guard, token) = acquire(&opened?.0, command, limit).await?;
            GUARDS.lock().await.insert(handle.to_owned(), guard);
            return Ok(json!({ "token": token }));
        }
        ("release", Some(guard), _) => match each!(guard, guard => guard.release().await) {
            Err(Error::NotHeld { .. } | Error::Lost { .. }) => return Ok(json!({ "held": false })),
            outcome => return Ok(outcome.map(|()| json!({ "held": true }))?),
        },
        ("downgrade", Some(Guard::Write(guard)), _) => {
            let guard = Guard::Read(guard.downgrade().await?);
            GUARDS.lock().await.insert(handle.to_owned(), guard);
            return Ok(json!({ "held": true }));
        }
        // The crate renews it.
        ("renew", _, Some(lease)) => return Ok(json!({ "held": !lease.is_lost() })),
        ("is_valid", _, Some(lease)) => return Ok(json!({ "valid": lease.end().is_none() })),
        ("lost", _, Some(lease)) => drop(timeout(limit, lease.lost()).await.map_err(|_| "timed_out")?),
        ("count", ..) => return count(opened?, command).await,
        ("close", ..) => opened?.0.close(Duration::from_secs(5)).await?,
        ("release" | "renew" | "downgrade" | "is_valid" | "lost", ..) => return Err("no such handle".into()),
        _ => return Err("unknown".into()),
    }
    Ok(json!({}))
}

/// Returns whether it was the last command.
async fn answer(command: Value) -> Outcome<bool> {
    let mut answer = run(&command).await.unwrap_or_else(|error| match error.downcast_ref() {
        Some(Error::TimedOut { .. }) => json!({ "error": "timed_out" }),
        Some(Error::WrongType { .. }) => json!({ "error": "wrong_type" }),
        Some(Error::TooDeep { .. }) => json!({ "error": "too_deep" }),
        Some(Error::WouldDeadlock { .. }) => json!({ "error": "would_deadlock" }),
        Some(Error::TooManyReaders { .. }) => json!({ "error": "too_many_readers" }),
        Some(Error::Lost { .. } | Error::NotHeld { .. }) => json!({ "error": "lost" }),
        Some(error) if error.is_transient() => json!({ "error": "no_answer", "text": error.to_string() }),
        Some(Error::Name(_)) => json!({ "error": "invalid_name" }),
        _ if ["timed_out", "unknown"].contains(&error.to_string().as_str()) => {
            json!({ "error": error.to_string() })
        }
        _ => json!({ "error": "failed", "text": error.to_string() }),
    });
    answer["ok"] = json!(answer.get("error").is_none());
    answer["id"] = command["id"].clone();
    Ok(writeln!(std::io::stdout(), "{answer}").map(|()| command["do"] == "close")?)
}

/// The URL of the server. `resp` is 2 or 3, the version of the protocol; else RESP2 is usual.
fn url(opened: &Value) -> String {
    let resp = opened["resp"].as_u64().unwrap_or_default().max(2);
    format!("{}?protocol=resp{resp}", text(opened, "url"))
}

fn text<'a>(command: &'a Value, field: &str) -> &'a str {
    command[field].as_str().unwrap_or_default()
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let command: Value = serde_json::from_str(&line).unwrap_or_default(); // null is unknown
        let is_async = command["async"] == true;
        let answered = tokio::spawn(answer(command));
        if !is_async && answered.await?? {
            break;
        }
    }
    Ok(())
}
