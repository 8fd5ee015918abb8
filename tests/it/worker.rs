//! The roles that worker processes play.

use crate::support::role;

/// Not a test of its own: what a worker process runs. See `support::Worker`.
#[test]
fn play() {
    let Some(_role) = role() else { return };
}
