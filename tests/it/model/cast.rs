//! Who takes part in a search.

/// One try of a client to get the lock.
#[derive(Debug)]
pub struct Attempt {
    pub name: &'static str,
    pub owner: usize,
    pub writes: bool,
    /// A request of it may always be under way still, so its client ends it for good.
    pub doubted: bool,
    /// How it stands in the queue.
    pub waiter: String,
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
    /// The lock and its companions, then what is kept of ended attempts and of a request to force.
    pub keys: Vec<String>,
}

impl Cast {
    /// `words`: an attempt each, like `A:w1!`. `A` or `B` for an owner, `-` for a stranger, who has none;
    /// `r` to read or `w` to write; `!` if requests of it may be late; `?` if no message reaches it.
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
            // Nobody is subscribed to anything, and without a channel there is nobody to be told.
            let waiter = format!("{name} 99999 {owner} {}", if deaf { "nobody-listens" } else { "" });
            let owner = owners.iter().position(|one| *one == owner).unwrap();
            attempts.push(Attempt { name, owner, writes: name.starts_with('w'), doubted, waiter });
        }
        let mut keys = ["k", "{k}:fence", "{k}:waiters"].map(str::to_owned).to_vec();
        keys.extend(attempts.iter().map(|it| format!("{{k}}:ended:{}", it.name)));
        keys.push("{k}:ended:f".to_owned());
        let begun = (begun + more()).min(attempts.len());
        Cast { title, attempts, owners, begun, steps: usize::MAX, keys }
    }

    /// Only the states that so many steps lead to.
    pub fn within(self, steps: usize) -> Cast {
        Cast { steps: steps + more(), ..self }
    }

    pub fn attempt(&self, name: &str) -> usize {
        self.attempts.iter().position(|it| it.name == name).unwrap_or_else(|| panic!("an attempt {name:?}"))
    }

    pub fn owner(&self, name: &str) -> usize {
        self.owners.iter().position(|it| *it == name).unwrap_or_else(|| panic!("an owner {name:?}"))
    }
}

/// `REDLATCH_MODEL`: how many attempts more are begun, and how many steps more are taken, than in an ordinary
/// run. One more takes some ten times as long.
pub fn more() -> usize {
    std::env::var("REDLATCH_MODEL").ok().and_then(|more| more.parse().ok()).unwrap_or(0)
}
