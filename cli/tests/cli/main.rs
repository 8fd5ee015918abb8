#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! The program `redlatch`, run as a user runs it, with private servers. docs/cli.md is its page.

mod admin;
mod program;
mod run;
mod run_escape;
mod run_loss;
mod run_messages;
mod run_namespaces;
mod run_outage;
mod run_processes;
mod run_signals;
mod run_unguarded;
mod run_users;
mod run_watchdog;
mod service_page;
mod show;
#[path = "../../../tests/it/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "tests/it uses the rest")]
mod support;
mod terminal;
