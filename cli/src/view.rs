//! [`View`]: a lock of any kind as the servers report it. `redlatch inspect`.

use std::fmt;

use redlatch::{Error, FencingToken, Holder, Inspection, Locks, Mode, Owner, RwInspection};
use serde::Serialize;

use crate::exit::{Failure, print, print_json};
use crate::servers::ServerArgs;

/// Show the holders of a lock, and how many clients wait.
#[derive(clap::Args)]
pub(crate) struct InspectArgs {
    /// Print JSON. It contains the owners in full: a program that knows an owner can release the
    /// lock.
    #[arg(long)]
    json: bool,
    /// The name of the lock.
    name: String,
}

impl InspectArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        let view = View::of(&servers.connect().await?, &self.name).await?;
        if self.json {
            print_json(&view)?
        } else {
            print(&view.to_string())?
        }
        Ok(0)
    }
}

/// A lock, with the fields of the JSON.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct View {
    name: String,
    /// A free lock has none.
    kind: Option<&'static str>,
    pub(crate) state: &'static str,
    holders: Vec<Holder>,
    holder_count: u64,
    waiters: u64,
    waiting_writers: Option<u64>,
    waiting_readers: Option<u64>,
    fencing_token: Option<FencingToken>,
}

impl View {
    /// Asks for each kind of lock in turn: a request for another kind changes nothing.
    pub(crate) async fn of(locks: &Locks, name: &str) -> Result<View, Failure> {
        match locks.mutex(name)?.inspect().await {
            Ok(lock) => return Ok(View::of_one(name, "mutex", lock)),
            Err(Error::WrongType { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        match locks.reentrant(name, &Owner::new())?.inspect().await {
            Ok(lock) => return Ok(View::of_one(name, "reentrant", lock)),
            Err(Error::WrongType { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(View::of_both(name, locks.rwlock(name)?.inspect().await?))
    }

    fn of_one(name: &str, kind: &'static str, lock: Inspection) -> View {
        let is_free = lock.holders.is_empty();
        View {
            name: name.to_owned(),
            kind: (!is_free).then_some(kind),
            state: if is_free { "free" } else { "held" },
            holder_count: lock.holders.len().try_into().unwrap_or(u64::MAX),
            holders: lock.holders,
            waiters: lock.waiters,
            waiting_writers: None,
            waiting_readers: None,
            fencing_token: lock.fencing_token,
        }
    }

    fn of_both(name: &str, lock: RwInspection) -> View {
        let state = match lock.mode {
            Mode::Read => "read",
            Mode::Write => "write",
            _ => "free",
        };
        View {
            name: name.to_owned(),
            kind: (state != "free").then_some("rwlock"),
            state,
            holder_count: lock.reader_count + u64::from(lock.writer.is_some()),
            holders: lock.writer.into_iter().chain(lock.readers).collect(),
            waiters: lock.waiting_writers + lock.waiting_readers,
            waiting_writers: Some(lock.waiting_writers),
            waiting_readers: Some(lock.waiting_readers),
            fencing_token: lock.fencing_token,
        }
    }

    /// Without what changes while nothing happens.
    pub(crate) fn is_same_as(&self, other: &View) -> bool {
        let holders = |view: &View| -> Vec<(String, u64)> {
            view.holders.iter().map(|holder| (holder.owner.clone(), holder.count)).collect()
        };
        (self.state, self.waiters, self.holder_count) == (other.state, other.waiters, other.holder_count)
            && holders(self) == holders(other)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holder_count > 0
    }

    /// The lock in one line.
    pub(crate) fn summary(&self) -> String {
        let colon = if self.holders.is_empty() { "" } else { ": " };
        format!("{:?} {}{colon}{}; {} waiting", self.name, self.state, self.first_holders(), self.waiters)
    }

    /// A held lock in one line, for one of its waiters.
    pub(crate) fn obstacle(&self) -> String {
        let others = match self.waiters.saturating_sub(1) {
            0 => "no other waits".to_owned(),
            1 => "1 other waits".to_owned(),
            others => format!("{others} others wait"),
        };
        format!("lock {:?}: waits: held by {}; {others}", self.name, self.first_holders())
    }

    /// A held lock in one line, for a `run` that gives up.
    pub(crate) fn conflict(&self) -> String {
        format!("lock {:?}: held by {}: nothing is started", self.name, self.first_holders())
    }

    fn first_holders(&self) -> String {
        let mut text = self.holders.first().map(ToString::to_string).unwrap_or_default();
        if self.holder_count > 1 {
            text += &format!(", and {} more", self.holder_count - 1);
        }
        text
    }
}

/// Several lines. Names and owners may come from other programs, so special characters are escaped.
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.name, self.state)?;
        if let Some(kind) = self.kind {
            write!(f, " ({kind})")?;
        }
        for holder in self.holders.iter().take(20) {
            write!(f, "\n  held by {holder}")?;
        }
        let listed = self.holders.len().min(20).try_into().unwrap_or(u64::MAX);
        if self.holder_count > listed {
            write!(f, "\n  and {} more", self.holder_count - listed)?;
        }
        match (self.waiting_writers, self.waiting_readers) {
            (Some(writers), Some(readers)) => {
                write!(f, "\n  waiting: {writers} to write, {readers} to read")?
            }
            _ => write!(f, "\n  waiting: {}", self.waiters)?,
        }
        match self.fencing_token {
            Some(token) => write!(f, "\n  last fencing token: {token}"),
            None => Ok(()),
        }
    }
}
