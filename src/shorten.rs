//! [`shortened`]: what a log may show of a name that gives rights to its bearer.

/// At most the first eight characters, and never more than half of them: enough to distinguish
/// holders, too few to enter or release a lock with.
pub(crate) fn shortened(name: &str) -> String {
    let shown = (name.chars().count() / 2).min(8);
    name.chars().take(shown).chain(['…']).collect()
}
