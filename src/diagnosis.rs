//! [`Finding`]: the result of one check of a server by the doctor.

use std::fmt;

use serde::Serialize;

/// One check of one server by [`Locks::doctor`](crate::Locks::doctor). `Display` is one line:
/// `10.0.0.1:6379: eviction: danger: ...`.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The server: its address, or what the client knows of it (`pool`, the name of a master).
    pub server: String,
    /// The check.
    pub check: Check,
    /// The result.
    pub verdict: Verdict,
}

/// The checks of [`Locks::doctor`](crate::Locks::doctor).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// The server replies.
    Connection,
    /// Its version is 6.2 or newer.
    Version,
    /// The client's user may run the scripts on the keys of a lock. Checked by trying each of their
    /// commands, and by acquiring and releasing a lock, under a new name.
    Scripts,
    /// The client is notified when it is granted a lock, and may notify other clients.
    Notifications,
    /// The server evicts no keys.
    Eviction,
    /// A restart of the server loses no lock. (`no-appendfsync-on-rewrite` is not looked at.)
    Persistence,
    /// Replicas confirm grants, or the master stops without them: a failover loses few locks.
    Replicas,
    /// The server's clock shows the same time as this machine's, to within a second: tokens may
    /// continue from it.
    Clock,
    /// In a [guarded](crate::RestartGuard) quorum: the node votes.
    Vote,
}

/// The result of a check of [`Locks::doctor`](crate::Locks::doctor).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No danger was found.
    Fine,
    /// Locks may be lost, delayed, or held twice.
    Danger {
        /// What may happen, and why.
        what: String,
        /// How to end the danger.
        remedy: &'static str,
    },
    /// The check could not be made.
    Unknown {
        /// Why not.
        why: String,
    },
}

impl Verdict {
    pub(crate) fn danger(what: impl Into<String>, remedy: &'static str) -> Verdict {
        Verdict::Danger { what: what.into(), remedy }
    }

    pub(crate) fn unknown(why: impl Into<String>) -> Verdict {
        Verdict::Unknown { why: why.into() }
    }

    /// Returns whether locks are in danger.
    pub fn is_danger(&self) -> bool {
        matches!(self, Verdict::Danger { .. })
    }
}

impl Finding {
    /// Whether this finding says that a server can be used.
    pub(crate) fn is_usable(&self) -> bool {
        self.check == Check::Connection && self.verdict == Verdict::Fine
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { server, check, verdict } = self;
        write!(f, "{server}: ")?;
        check.serialize(&mut *f)?; // its name in JSON
        match verdict {
            Verdict::Fine => write!(f, ": fine"),
            Verdict::Danger { what, remedy } => write!(f, ": danger: {what}: {remedy}"),
            Verdict::Unknown { why } => write!(f, ": unknown: {why}"),
        }
    }
}

/// The oldest version that the scripts are tested on.
const OLDEST: (u32, u32) = (6, 2);

pub(crate) fn version(redis: Option<&str>) -> Verdict {
    let Some(version) = redis else { return Verdict::unknown(NO_INFO) };
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    match numbers.next().zip(numbers.next()) {
        Some(numbers) if numbers >= OLDEST => Verdict::Fine,
        Some(_) => Verdict::danger(format!("it is version {version}"), "use Redis 6.2, Valkey 8, or later"),
        None => Verdict::unknown(format!("its version is {version:?}")),
    }
}

/// Every key of a lock has a TTL, so policies that evict only such keys evict them first.
pub(crate) fn eviction(maxmemory: Option<&str>, policy: Option<&str>) -> Verdict {
    match (maxmemory, policy) {
        (Some("0"), _) | (_, Some("noeviction")) => Verdict::Fine,
        (Some(_), Some(policy)) => Verdict::danger(
            format!("it evicts keys once its memory is full ({policy}), held locks included"),
            "set maxmemory-policy noeviction, or use a separate server for locks",
        ),
        _ => Verdict::unknown(NO_INFO),
    }
}

/// `aof` as in `INFO`, `fsync` as in `CONFIG GET appendfsync`.
pub(crate) fn persistence(aof: Option<&str>, fsync: Option<&str>) -> Verdict {
    let remedy =
        "set appendonly yes and appendfsync always; on a quorum, the restart guard is an alternative";
    match (aof, fsync) {
        (Some("0"), _) => Verdict::danger("a restart loses held locks", remedy),
        (Some(_), Some("always")) => Verdict::Fine,
        (Some(_), Some(fsync)) => {
            Verdict::danger(format!("a restart may lose the latest grants (appendfsync {fsync})"), remedy)
        }
        (Some(_), None) => Verdict::unknown("the user may not run CONFIG GET appendfsync"),
        (None, _) => Verdict::unknown(NO_INFO),
    }
}

/// `role` and `count` as in `INFO`; `needed` as in `CONFIG GET min-replicas-to-write`;
/// `has_confirmation` if grants are confirmed by replicas.
pub(crate) fn replicas(
    role: Option<&str>,
    count: Option<&str>,
    needed: Option<&str>,
    has_confirmation: bool,
) -> Verdict {
    let loses = "a failover may lose held locks: replication is asynchronous";
    let remedy = "set min-replicas-to-write and, in programs, Options::replicas; and compare fencing tokens";
    match (role, count) {
        (Some("slave"), _) => Verdict::danger("it is a replica, which grants nothing", "name its master"),
        (Some(_), Some("0")) => Verdict::Fine,
        (Some(_), Some(_)) if has_confirmation => Verdict::Fine,
        (Some(_), Some(_)) => match needed {
            Some("0") => Verdict::danger(loses, remedy),
            Some(_) => Verdict::Fine,
            None => Verdict::unknown("the user may not run CONFIG GET min-replicas-to-write"),
        },
        _ => Verdict::unknown(NO_INFO),
    }
}

/// `ahead`: by how many milliseconds the server's clock is ahead of this machine's.
pub(crate) fn clock(ahead: Option<i64>) -> Verdict {
    let Some(ahead) = ahead else { return Verdict::unknown("the user may not run TIME") };
    let seconds = ahead.unsigned_abs() as f64 / 1_000.0;
    let side = if ahead > 0 { "ahead of" } else { "behind" };
    match ahead {
        -1_000..=1_000 => Verdict::Fine,
        _ => Verdict::danger(
            format!(
                "its clock is {seconds:.1} s {side} this machine's: if a fencing counter is lost, or another \
                 server takes over, tokens may go back"
            ),
            "synchronize the clocks of all servers, with NTP for instance",
        ),
    }
}

/// What helps where a right is missing.
pub(crate) const GRANT_RIGHTS: &str =
    "grant the user the rights listed in the guide at docs.rs/redlatch, page rights";

pub(crate) fn unusable(why: &str) -> Verdict {
    // What the server says; the first that fits.
    const REMEDIES: [(&str, &str); 6] = [
        ("max number of clients", "raise maxclients, or look for a program that leaves connections open"),
        ("protected mode", "set a password, and bind the server to the addresses that clients use"),
        ("its URL must begin with", "change the URL"),
        ("NoPerm", GRANT_RIGHTS),
        ("unknown command", "name the server as what it is: a sentinel in sentinel, a master elsewhere"),
        ("cluster support disabled", "name it in server, not in cluster"),
    ];
    let fits = |(said, _): &&(&str, _)| why.contains(said);
    let remedy = REMEDIES.iter().find(fits).map(|(_, remedy)| *remedy);
    Verdict::danger(
        format!("it cannot be used: {why}"),
        remedy.unwrap_or("start it, and check its address and the user's password"),
    )
}

const NO_INFO: &str = "the user may not run INFO, or its reply lacks this field";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_more_than_a_second_off_is_a_danger() {
        for ahead in [-1_000, 0, 1_000] {
            assert_eq!(clock(Some(ahead)), Verdict::Fine, "{ahead}");
        }
        for (ahead, text) in [(-1_001, "1.0 s behind"), (90_500, "90.5 s ahead of")] {
            let verdict = clock(Some(ahead));
            let Verdict::Danger { what, .. } = &verdict else { panic!("{verdict:?}") };
            assert!(what.contains(text), "{what}");
        }
        assert!(matches!(clock(None), Verdict::Unknown { .. }));
    }
}
