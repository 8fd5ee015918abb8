//! [`Inspection`]: a lock as the server sees it.

use std::time::Duration;

use serde::Serialize;

use crate::fencing::FencingToken;

/// A lock as the server saw it at one instant. It may have changed since: this is for people, logs and
/// dashboards, not for deciding who may enter.
///
/// With serde, durations are in milliseconds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// Who holds it; empty if nobody does.
    pub holders: Vec<Holder>,
    /// How many clients are queued for it. Tasks of one client queue inside the client and count once.
    pub waiters: u64,
    /// The last token granted, if the server remembers one.
    pub fencing_token: Option<FencingToken>,
}

impl Inspection {
    pub(crate) fn is_held_by(&self, owner: &str) -> bool {
        self.holders.iter().any(|holder| holder.owner == owner)
    }
}

/// One who holds a lock.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The owner of a re-entrant lock; the token of a mutex. Whoever knows it can release the lock:
    /// keep it out of public logs.
    pub owner: String,
    /// How many holds.
    pub count: u64,
    /// How long the server keeps it, unless it is renewed. `None`: for ever, so not ours.
    #[serde(rename = "remaining_ms", serialize_with = "millis")]
    pub remaining: Option<Duration>,
}

impl Holder {
    /// From the `owner, count, pttl` of an answer.
    pub(crate) fn from_reply(texts: &[String]) -> Option<Holder> {
        let [owner, count, pttl] = texts else { return None };
        let remaining = u64::try_from(pttl.parse::<i64>().ok()?).ok().map(Duration::from_millis);
        Some(Holder { owner: owner.clone(), count: count.parse().ok()?, remaining })
    }
}

fn millis<S: serde::Serializer>(span: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)).serialize(to)
}
