//! The server to test against; the tests inside the library use it as well.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The server's binary: `scripts/test` sets it, and `scripts/server` finds or fetches one.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("REDLATCH_SERVER") {
        return path.into();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/server");
    let output = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "no Redis or Valkey server: run scripts/server, or set REDLATCH_SERVER");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().last().expect("scripts/server prints a path").into()
}
