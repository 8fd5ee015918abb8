#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! What a reader relies on, and no compiler checks: the layers of the sources, the links and texts
//! of the pages, and the form of both. It needs no server.

mod figures;
mod go_module;
mod links;
mod pages;
mod prose;
mod sources;
