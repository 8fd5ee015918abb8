//! The server to test against; the tests inside the library use it as well.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The server's binary: `scripts/test` sets it, and `scripts/server` finds or fetches one.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("REDLATCH_SERVER") {
        return path.into();
    }
    let output = Command::new(repository().join("scripts/server")).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "no Redis or Valkey server: run scripts/server, or set REDLATCH_SERVER");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().last().expect("scripts/server prints a path").into()
}

/// The folder of the repository, also for the tests of another package in it. A copy in
/// `target/`, which the fault checker breaks, is such a folder: it has a `lua/` of its own.
pub fn repository() -> &'static Path {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join("lua/protocol.json").is_file()).expect("a folder with lua/")
}
