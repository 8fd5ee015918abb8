//! Builds an example, for tests that run it as processes.

use std::process::{Command, Stdio};

/// Builds the example, and returns the path of its program.
pub fn example(name: &str) -> String {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let arguments = ["build", "--quiet", "--all-features", "--example", name, "--target-dir"];
    let mut cargo = Command::new(env!("CARGO"));
    // Else everything is built again, as if for another package or another toolchain.
    let package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars().filter(|(name, _)| package(name) || name == "RUSTC_BOOTSTRAP") {
        cargo.env_remove(name);
    }
    let built = cargo.args(arguments).arg(target).arg("--message-format=json");
    let built = built.current_dir(env!("CARGO_MANIFEST_DIR")).stderr(Stdio::inherit()).output().unwrap();
    assert!(built.status.success(), "cargo build: {}", built.status);
    let artifact = |line: &str| -> Option<String> {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == name).then(|| message["executable"].as_str().map(str::to_owned))?
    };
    String::from_utf8(built.stdout).unwrap().lines().find_map(artifact).expect("cargo names the program")
}
