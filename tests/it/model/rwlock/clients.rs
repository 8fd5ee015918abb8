//! The participants of a search.

/// One attempt of a client to acquire the lock.
#[derive(Debug)]
pub struct Attempt {
    pub name: &'static str,
    pub owner: usize,
    pub writes: bool,
    /// Its requests may be late, so its release ends the attempt for ever.
    pub has_late_requests: bool,
    /// Its channel has no subscriber, so it counts as disconnected.
    pub is_unsubscribed: bool,
}

/// The source of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// The server's counter.
    Counted,
    /// The requests, each of which proposes a larger one than all before.
    Proposed,
    Off,
}

/// Attempts, each used once, and the bounds of the search.
#[derive(Debug)]
pub struct Scenario {
    pub title: &'static str,
    pub attempts: Vec<Attempt>,
    pub owners: Vec<&'static str>,
    /// The largest number of attempts that are begun.
    pub begun: usize,
    /// The largest number of steps.
    pub steps: usize,
    /// Whether the queue has entries that no step may change: a waiter of another kind, and marks.
    pub others: bool,
    pub fencing: Fencing,
    /// Whether a waiter may miss a claim.
    pub may_miss: bool,
}

/// The keys of the lock.
pub const KEYS: [&str; 3] = ["k", "{k}:waiters", "{k}:fence"];

/// The longest claim that is allowed: the time for which a waiter counts as alive after a request,
/// and for which a granted lock is held for it.
pub const CLAIM_MS: &str = "60000";

pub const MAX_DEPTH: &str = "9";

/// A channel without subscribers.
pub const UNSUBSCRIBED_CHANNEL: &str = "wake:00000000000000000000000000000000";

impl Scenario {
    /// `words` has one word per attempt, like `A:w1!`:
    /// - `A` or `B`: its owner; `-`: a stranger, without an owner.
    /// - `r`: it reads; `w`: it writes.
    /// - `!`: its requests may be late.
    /// - `?`: no message reaches it.
    pub fn new(title: &'static str, begun: usize, words: &'static str) -> Scenario {
        let (mut attempts, mut owners) = (Vec::new(), Vec::new());
        for word in words.split(' ') {
            let (owner, name) = word.split_once(':').unwrap();
            let (has_late_requests, is_unsubscribed) = (name.contains('!'), name.contains('?'));
            let name = name.trim_end_matches(['!', '?']);
            let owner = if owner == "-" { name } else { owner };
            if !owners.contains(&owner) {
                owners.push(owner);
            }
            let owner = owners.iter().position(|one| *one == owner).unwrap();
            attempts.push(Attempt {
                name,
                owner,
                writes: name.starts_with('w'),
                has_late_requests,
                is_unsubscribed,
            });
        }
        let begun = (begun + more()).min(attempts.len());
        Scenario {
            title,
            attempts,
            owners,
            begun,
            steps: usize::MAX,
            others: false,
            fencing: Fencing::Counted,
            may_miss: true,
        }
    }

    /// Searches only the states within this number of steps.
    pub fn within(self, steps: usize) -> Scenario {
        Scenario { steps: steps + more(), ..self }
    }

    /// Adds a waiter of another kind and the marks of other attempts to the queue.
    pub fn beside_others(self) -> Scenario {
        Scenario { others: true, ..self }
    }

    /// Keeps all waiters alive in an ordinary run: there are too many states otherwise.
    pub fn all_alive(self) -> Scenario {
        Scenario { may_miss: more() > 0, ..self }
    }

    pub fn fenced(self, fencing: Fencing) -> Scenario {
        Scenario { fencing, ..self }
    }

    pub fn on_quorum(self) -> Scenario {
        let fencing = if self.fencing == Fencing::Off { Fencing::Off } else { Fencing::Proposed };
        Scenario { fencing, ..self }
    }

    /// The smallest answer of a grant.
    pub fn least_token(&self) -> i64 {
        i64::from(self.fencing != Fencing::Off)
    }

    /// The text of an attempt's entry in the queue.
    pub fn waiter(&self, one: usize) -> String {
        let Attempt { name, owner, writes, is_unsubscribed, .. } = &self.attempts[one];
        let (kind, channel) = (
            if *writes { "write" } else { "read" },
            if *is_unsubscribed { UNSUBSCRIBED_CHANNEL } else { "" },
        );
        let owner = Some(self.owners[*owner]).filter(|owner| owner != name).unwrap_or("");
        format!("{name} {kind} {CLAIM_MS} {channel} {owner} {MAX_DEPTH}")
    }

    pub fn attempt(&self, name: &str) -> usize {
        self.attempts.iter().position(|one| one.name == name).unwrap_or_else(|| panic!("an attempt {name:?}"))
    }

    pub fn owner(&self, name: &str) -> usize {
        self.owners.iter().position(|one| *one == name).unwrap_or_else(|| panic!("an owner {name:?}"))
    }
}

/// `REDLATCH_MODEL`: the number of attempts and steps beyond those of an ordinary run. One more
/// takes about ten times as long.
pub fn more() -> usize {
    std::env::var("REDLATCH_MODEL").ok().and_then(|more| more.parse().ok()).unwrap_or(0)
}
