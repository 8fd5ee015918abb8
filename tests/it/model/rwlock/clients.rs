//! Who takes part in a search.

/// One try of a client to get the lock.
#[derive(Debug)]
pub struct Attempt {
    pub name: &'static str,
    pub owner: usize,
    pub writes: bool,
    /// A request of it may always be under way still, so its client ends it for good.
    pub doubted: bool,
    /// Its channel has no subscriber, so that it counts as disconnected.
    pub deaf: bool,
}

/// Where the tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// The server counts.
    Counted,
    /// The requests propose them, each a larger one than all before.
    Proposed,
    Off,
}

/// Attempts, each of them used once, and how many of them are begun at most.
#[derive(Debug)]
pub struct Cast {
    pub title: &'static str,
    pub attempts: Vec<Attempt>,
    pub owners: Vec<&'static str>,
    pub begun: usize,
    /// How many steps are taken at most.
    pub steps: usize,
    /// Entries of the queue that no step may change: of another kind, or marks of other attempts.
    pub others: bool,
    pub fencing: Fencing,
    /// Whether the claim of a waiter may pass in which it is not seen.
    pub may_miss: bool,
    /// The scripts are those for quorums.
    pub quorum: bool,
}

/// The lock and its companions.
pub const KEYS: [&str; 3] = ["k", "{k}:fence", "{k}:waiters"];

/// How long a waiter that was seen counts as alive, and how long a lock is kept for it: the longest
/// that is allowed.
pub const CLAIM_MS: &str = "60000";

pub const MAX_DEPTH: &str = "9";

/// No client subscribes to it.
pub const DEAF_CHANNEL: &str = "wake:00000000000000000000000000000000";

impl Cast {
    /// `words`: an attempt each, like `A:w1!`. `A` or `B` for an owner, `-` for a stranger, who has
    /// none; `r` to read or `w` to write; `!` if requests of it may be late; `?` if no message
    /// reaches it.
    pub fn new(title: &'static str, begun: usize, words: &'static str) -> Cast {
        let (mut attempts, mut owners) = (Vec::new(), Vec::new());
        for word in words.split(' ') {
            let (owner, name) = word.split_once(':').unwrap();
            let (doubted, deaf) = (name.contains('!'), name.contains('?'));
            let name = name.trim_end_matches(['!', '?']);
            let owner = if owner == "-" { name } else { owner };
            if !owners.contains(&owner) {
                owners.push(owner);
            }
            let owner = owners.iter().position(|one| *one == owner).unwrap();
            attempts.push(Attempt { name, owner, writes: name.starts_with('w'), doubted, deaf });
        }
        let begun = (begun + more()).min(attempts.len());
        Cast {
            title,
            attempts,
            owners,
            begun,
            steps: usize::MAX,
            others: false,
            fencing: Fencing::Counted,
            may_miss: true,
            quorum: false,
        }
    }

    /// Only the states that so many steps lead to.
    pub fn within(self, steps: usize) -> Cast {
        Cast { steps: steps + more(), ..self }
    }

    /// A waiter of another kind and the mark of another attempt are in the queue's key all the
    /// time.
    pub fn beside_others(self) -> Cast {
        Cast { others: true, ..self }
    }

    /// In an ordinary run, all waiters are alive: there are too many states otherwise.
    pub fn all_alive(self) -> Cast {
        Cast { may_miss: more() > 0, ..self }
    }

    pub fn fenced(self, fencing: Fencing) -> Cast {
        Cast { fencing, ..self }
    }

    pub fn on_quorum(self) -> Cast {
        let fencing = if self.fencing == Fencing::Off { Fencing::Off } else { Fencing::Proposed };
        Cast { quorum: true, fencing, ..self }
    }

    /// The least that a grant is answered with.
    pub fn least_token(&self) -> i64 {
        i64::from(self.fencing != Fencing::Off)
    }

    /// The text by which an attempt is queued.
    pub fn waiter(&self, one: usize) -> String {
        let Attempt { name, owner, writes, deaf, .. } = &self.attempts[one];
        let (kind, channel) = (if *writes { "write" } else { "read" }, if *deaf { DEAF_CHANNEL } else { "" });
        let owner = Some(self.owners[*owner]).filter(|owner| owner != name).unwrap_or("");
        format!("{name} {kind} {CLAIM_MS} {channel} {owner} {MAX_DEPTH}")
    }

    pub fn attempt(&self, name: &str) -> usize {
        self.attempts.iter().position(|it| it.name == name).unwrap_or_else(|| panic!("an attempt {name:?}"))
    }

    pub fn owner(&self, name: &str) -> usize {
        self.owners.iter().position(|it| *it == name).unwrap_or_else(|| panic!("an owner {name:?}"))
    }
}

/// `REDLATCH_MODEL`: how many attempts more are begun, and how many steps more are taken, than in
/// an ordinary run. One more takes some ten times as long.
pub fn more() -> usize {
    std::env::var("REDLATCH_MODEL").ok().and_then(|more| more.parse().ok()).unwrap_or(0)
}
