//! Exhaustive searches: every state that a few clients can bring a lock to.

mod rwlock;
mod tokens;

pub use rwlock::more;

/// A broken rule or promise, and the shortest path to it.
#[derive(Debug)]
pub struct Violation {
    pub what: String,
    pub way: Vec<String>,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (number, step) in self.way.iter().enumerate() {
            writeln!(f, "  {}. {step}", number + 1)?;
        }
        write!(f, "  {}", self.what)
    }
}
