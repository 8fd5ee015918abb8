//! [`shortened`]: the part of an owner or an attempt that a log may show.

/// Returns at most the first eight characters, and never more than half of them: they
/// distinguish holders in a log, and neither acquire nor release a lock.
pub(crate) fn shortened(name: &str) -> String {
    let shown = (name.chars().count() / 2).min(8);
    name.chars().take(shown).chain(['…']).collect()
}
