//! [`Inspection`]: a lock as the server reports it.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use crate::fencing::FencingToken;
use crate::labels::Labels;
use crate::shorten::shortened;

/// A lock as the server reported it at one instant. It may have changed since: use it for logs and
/// dashboards, not to decide which client may enter.
///
/// With serde, durations are in milliseconds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// The holders; empty if the lock is free.
    pub holders: Vec<Holder>,
    /// The number of queued clients. Tasks of one client queue inside the client and count once.
    pub waiters: u64,
    /// The last token granted, if the server remembers one; or a later one that is reserved for
    /// tasks of the holder's [client](crate::Options::local_turn) or, on a quorum, was accepted by
    /// a minority.
    pub fencing_token: Option<FencingToken>,
}

impl Inspection {
    /// Reads the holders of a reply: `owner, count, pttl` for each.
    pub(crate) fn from_reply(
        fencing_token: Option<FencingToken>,
        waiters: u64,
        holders: &[String],
    ) -> Option<Inspection> {
        let holders = holders.chunks(3).map(Holder::from_reply).collect::<Option<_>>()?;
        Some(Inspection { holders, waiters, fencing_token })
    }

    /// Merges the nodes' reports into what a majority agrees on.
    pub(crate) fn merge(views: &[Inspection], majority: usize) -> Inspection {
        let seen: Vec<&[Holder]> = views.iter().map(|view| view.holders.as_slice()).collect();
        Inspection {
            holders: merge_holders(&seen, majority),
            waiters: views.iter().map(|view| view.waiters).max().unwrap_or(0),
            fencing_token: views.iter().filter_map(|view| view.fencing_token).max(),
        }
    }

    pub(crate) fn is_held_by(&self, owner: &str) -> bool {
        self.holders.iter().any(|holder| holder.owner == owner)
    }
}

/// A read-write lock as the server reported it at one instant. It may have changed since: use it
/// for logs and dashboards, not to decide which client may enter.
///
/// With serde, durations are in milliseconds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RwInspection {
    /// Whether the lock is free, or held to read or to write.
    pub mode: Mode,
    /// The writer.
    pub writer: Option<Holder>,
    /// The readers, at most 500 of them. An owner that writes may read as well.
    pub readers: Vec<Holder>,
    /// The number of readers. It may include crashed readers whose holds have expired; `readers`
    /// does not, but lists at most 500.
    pub reader_count: u64,
    /// The number of waiters queued to write. Tasks of one client without an owner queue inside the
    /// client and count once.
    pub waiting_writers: u64,
    /// The number of waiters queued to read.
    pub waiting_readers: u64,
    /// The last token granted, if the server remembers one; or a later one that is reserved for
    /// tasks of the holder's [client](crate::Options::local_turn) or, on a quorum, was accepted by
    /// a minority.
    pub fencing_token: Option<FencingToken>,
}

/// Whether a read-write lock is free, or held to read or to write.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The lock is free.
    Free,
    /// Some owners read.
    Read,
    /// One owner writes.
    Write,
}

impl RwInspection {
    /// Reads the rest of a reply: `waiting_writers, readers`, then `side, owner, count, pttl` for
    /// each holder.
    pub(crate) fn from_reply(
        fencing_token: Option<FencingToken>,
        waiters: u64,
        rest: &[String],
    ) -> Option<RwInspection> {
        let [waiting_writers, reader_count, holders @ ..] = rest else { return None };
        let waiting_writers = waiting_writers.parse().ok()?;
        let reader_count: u64 = reader_count.parse().ok()?;
        let (mut writer, mut readers) = (None, Vec::new());
        for words in holders.chunks(4) {
            let (side, holder) = words.split_first()?;
            match side.as_str() {
                "write" => writer = Some(Holder::from_reply(holder)?),
                "read" => readers.push(Holder::from_reply(holder)?),
                _ => return None,
            }
        }
        Some(RwInspection {
            mode: mode(writer.as_ref(), &readers, reader_count),
            writer,
            readers,
            reader_count,
            waiting_writers,
            waiting_readers: waiters.checked_sub(waiting_writers)?,
            fencing_token,
        })
    }

    /// Merges the nodes' reports into what a majority agrees on.
    pub(crate) fn merge(views: &[RwInspection], majority: usize) -> RwInspection {
        let most = |of: fn(&RwInspection) -> u64| views.iter().map(of).max().unwrap_or(0);
        let writing: Vec<&[Holder]> = views.iter().map(|view| view.writer.as_slice()).collect();
        let reading: Vec<&[Holder]> = views.iter().map(|view| view.readers.as_slice()).collect();
        let writer = merge_holders(&writing, majority).pop();
        let readers = merge_holders(&reading, majority);
        // The largest count that a majority of the nodes reaches.
        let mut counts: Vec<u64> = views.iter().map(|view| view.reader_count).collect();
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        let reader_count = counts.get(majority - 1).copied().unwrap_or(0);
        RwInspection {
            mode: mode(writer.as_ref(), &readers, reader_count),
            waiting_writers: most(|view| view.waiting_writers),
            waiting_readers: most(|view| view.waiting_readers),
            fencing_token: views.iter().filter_map(|view| view.fencing_token).max(),
            writer,
            readers,
            reader_count,
        }
    }
}

fn mode(writer: Option<&Holder>, readers: &[Holder], reader_count: u64) -> Mode {
    match (writer, readers.is_empty()) {
        (Some(_), _) => Mode::Write,
        (None, false) => Mode::Read,
        // The nodes listed only samples of their readers: all expired, or known to a minority.
        (None, true) if reader_count > 0 => Mode::Read,
        (None, true) => Mode::Free,
    }
}

/// The holders that a majority of the nodes reports, with the time for which a majority keeps them.
fn merge_holders(views: &[&[Holder]], majority: usize) -> Vec<Holder> {
    let mut holders: Vec<Holder> = Vec::new();
    for holder in views.iter().flat_map(|view| view.iter()) {
        if holders.iter().any(|known| known.owner == holder.owner) {
            continue;
        }
        let mut seen: Vec<&Holder> =
            views.iter().filter_map(|view| view.iter().find(|seen| seen.owner == holder.owner)).collect();
        if seen.len() < majority {
            continue;
        }
        seen.sort_by_key(|holder| std::cmp::Reverse(holder.remaining));
        let remaining = seen[majority - 1].remaining;
        // A minority may still have a hold that was released.
        seen.sort_by_key(|holder| std::cmp::Reverse(holder.count));
        let count = seen[majority - 1].count;
        holders.push(Holder { owner: holder.owner.clone(), count, remaining });
    }
    holders
}

/// A holder of a lock.
///
/// [`client_name`](Holder::client_name) and [`label`](Holder::label) identify its client, if that
/// client was [made with them](crate::guide::connecting#names). `Display` is one line for an
/// operator:
///
/// ```
/// # async fn run(locks: redlatch::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// for holder in locks.mutex("backup")?.inspect().await?.holders {
///     println!("{holder}"); // billing:pod-7 (1f3a9c02…), 1 hold, 28.4s left
///     assert_eq!(holder.label(), Some("pod-7"));
/// }
/// # Ok(()) }
/// ```
///
/// With serde, both are fields, or `null`.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq)]
pub struct Holder {
    /// The owner, if there is one; otherwise the attempt: its id, and its client's labels. A client
    /// that knows this word can release the lock: keep it out of public logs. `Debug` and `Display`
    /// show only its start; serde writes it in full.
    pub owner: String,
    /// The number of the owner's holds.
    pub count: u64,
    /// How long the server keeps the hold without renewal. `None`: for ever, so another program
    /// wrote it.
    pub remaining: Option<Duration>,
}

impl Holder {
    /// Reads the `owner, count, pttl` of a reply.
    pub(crate) fn from_reply(texts: &[String]) -> Option<Holder> {
        let [owner, count, pttl] = texts else { return None };
        let remaining = u64::try_from(pttl.parse::<i64>().ok()?).ok().map(Duration::from_millis);
        Some(Holder { owner: owner.clone(), count: count.parse().ok()?, remaining })
    }

    /// Returns the [client name](crate::LocksBuilder::client_name) of the client that holds the
    /// lock. `None` in the cases of [`label`](Holder::label).
    pub fn client_name(&self) -> Option<&str> {
        Some(Labels::of_attempt(&self.owner).client_name).filter(|name| !name.is_empty())
    }

    /// Returns the [label](crate::LocksBuilder::label) of the client that holds the lock.
    ///
    /// `None` if
    /// - the client has no label,
    /// - another program holds the lock, or
    /// - the hold has an [`Owner`](crate::Owner), as every hold on a
    ///   [`ReentrantLock`](crate::ReentrantLock) has. Several clients may share an owner, and the
    ///   server answers with the owner alone. An [`Owner::from_word`](crate::Owner::from_word) such
    ///   as `billing.pod-7.<UUID>` identifies the instance here.
    pub fn label(&self) -> Option<&str> {
        Some(Labels::of_attempt(&self.owner).label).filter(|label| !label.is_empty())
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder")
            .field("owner", &shortened(&self.owner))
            .field("client_name", &self.client_name())
            .field("label", &self.label())
            .field("count", &self.count)
            .field("remaining", &self.remaining)
            .finish()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = shortened(&self.owner);
        match Labels::of_attempt(&self.owner).joint_name() {
            // Another program may choose any word as an owner, so special characters are escaped.
            None => write!(f, "{}", owner.escape_debug())?,
            Some(labels) => write!(f, "{labels} ({owner})")?,
        }
        write!(f, ", {} hold{}, ", self.count, if self.count == 1 { "" } else { "s" })?;
        match self.remaining {
            Some(remaining) => write!(f, "{remaining:.1?} left"),
            None => f.write_str("without a TTL"),
        }
    }
}

impl Serialize for Holder {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let mut fields = to.serialize_struct("Holder", 5)?;
        fields.serialize_field("owner", &self.owner)?;
        fields.serialize_field("client_name", &self.client_name())?;
        fields.serialize_field("label", &self.label())?;
        fields.serialize_field("count", &self.count)?;
        fields.serialize_field("remaining_ms", &self.remaining.map(millis))?;
        fields.end()
    }
}
