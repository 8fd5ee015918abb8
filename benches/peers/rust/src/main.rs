//! Measures redlatch, rslock, rlock and distkit, as `benches/peers/README.md` describes.

mod libraries;
mod pairs;
mod shared;
mod turns;

use std::time::Duration;

use libraries::{Kind, Library};
use serde::Serialize;
use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let url = std::env::args().nth(1).ok_or("usage: redlatch-peers redis://HOST:PORT/")?;
    let mut commands = Commands(BufReader::new(tokio::io::stdin()).lines());
    while let Some(line) = commands.0.next_line().await? {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["libraries"] => print(&libraries::description())?,
            ["pairs", library, kind, tasks, seconds] => {
                let (library, kind) = (Library::named(library)?, Kind::named(kind)?);
                let seconds = Duration::from_secs_f64(seconds.parse()?);
                print(&pairs::measure(&url, library, kind, tasks.parse()?, seconds, &mut commands).await?)?;
            }
            ["shared", library, kind, tasks, names, seconds, poll_ms] => {
                let (library, kind) = (Library::named(library)?, Kind::named(kind)?);
                let (tasks, names) = (tasks.parse()?, names.parse()?);
                let seconds = Duration::from_secs_f64(seconds.parse()?);
                let poll = Duration::from_millis(poll_ms.parse()?);
                print(
                    &shared::measure(&url, library, kind, (tasks, names), seconds, poll, &mut commands)
                        .await?,
                )?;
            }
            ["turns", library, kind, clients, seconds, poll_ms] => {
                let (library, kind) = (Library::named(library)?, Kind::named(kind)?);
                let seconds = Duration::from_secs_f64(seconds.parse()?);
                let poll = Duration::from_millis(poll_ms.parse()?);
                print(
                    &turns::measure(&url, library, kind, clients.parse()?, seconds, poll, &mut commands)
                        .await?,
                )?;
            }
            _ => return Err(format!("unknown command: {line}").into()),
        }
    }
    Ok(())
}

/// The lines of standard input.
struct Commands(Lines<BufReader<Stdin>>);

impl Commands {
    /// Reports that the measurement is prepared, and waits for the line `go`.
    async fn go(&mut self) -> Outcome<()> {
        print(&serde_json::json!({ "ready": true }))?;
        match self.0.next_line().await? {
            Some(line) if line == "go" => Ok(()),
            other => Err(format!("{other:?} instead of go").into()),
        }
    }
}

fn print(value: &impl Serialize) -> Outcome<()> {
    // Standard output is flushed at the end of each line.
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}
