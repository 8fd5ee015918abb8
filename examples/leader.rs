//! One leader among processes: start it several times, with a name each, and kill the leader or
//! stop the server. `tests/it/leader.rs` does so with three.
//!
//! ```sh
//! cargo run --example leader -- redis://127.0.0.1/ alice
//! ```

use std::time::Duration;

use redlatch::redis::{Client, RedisError};
use redlatch::{FencingToken, Lease, Locks, Options, fenced};

/// How long the others wait for a leader that was killed.
const TTL: Duration = Duration::from_secs(3);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Prints the end of a term, however it ends: its work is dropped.
struct Term<'a>(&'a str);

impl Drop for Term<'_> {
    fn drop(&mut self) {
        println!("{} steps down", self.0);
    }
}

/// What a leader does again and again: here it writes its name, unless a later one has.
async fn step(redis: &Client, token: FencingToken, name: &str) -> Result<bool, RedisError> {
    let mut redis = redis.get_multiplexed_async_connection().await?; // a service has a pool
    fenced::set(&mut redis, "{leader}:name", "{leader}:token", token, name).await
}

/// Waits for Ctrl-C, or for TERM, with which systemd, Docker and Kubernetes end a program.
async fn asked_to_end() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminated = signal(SignalKind::terminate())?;
        tokio::select! {
            pressed = tokio::signal::ctrl_c() => pressed,
            _ = terminated.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, url, name] = args.as_slice() else { return Err("usage: leader URL NAME".into()) };
    let redis = Client::open(url.as_str())?;
    let options = Options::new().ttl(TTL);
    let locks = Locks::builder().server(url).label(name).options(options).connect_lazily()?;
    println!("{name} competes");
    let election = locks.elect("leader", async |lease: Lease| -> Outcome<()> {
        let _term = Term(name);
        let token = lease.fencing_token().ok_or("fencing is off")?;
        println!("{name} leads under token {token}");
        loop {
            // An error of a step ends no term: the server may be down for a while.
            match step(&redis, token, name).await {
                Ok(true) => {}
                Ok(false) => println!("{name} was refused: a later leader has written"),
                Err(error) => println!("{name} could not write: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    tokio::select! {
        outcome = election => outcome?,
        asked = asked_to_end() => asked?, // drops the election
    }
    Ok(locks.close(Duration::from_secs(5)).await?) // the next one leads at once
}
