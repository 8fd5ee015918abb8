#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a check fails")]
//! The fault checker: real servers, worker processes that use the public API, faults, and a judge.
//!
//! `scripts/check` runs it; docs/testing.md has its rules and its findings.

mod arguments;
mod clock;
mod faults;
mod history;
mod history_files;
mod judge;
mod leftovers;
mod mutants;
mod observer;
mod plan;
mod report;
mod resource;
mod run;
mod sets;
#[path = "../it/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the suite uses the rest")]
mod support;
mod worker;
mod worker_processes;
mod workload;

use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.as_slice() {
        [role, settings] if role == "worker" => {
            worker::main(settings);
            ExitCode::SUCCESS
        }
        words => match arguments::read(words) {
            Ok(arguments) => {
                mutants::assert_current();
                judge::assert_judges();
                report::run(&arguments)
            }
            Err(error) => {
                eprint!("{error}\n\n{}", arguments::HELP);
                ExitCode::from(2)
            }
        },
    }
}
