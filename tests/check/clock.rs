//! A server whose clock steps: a preloaded library replaces the C library's clock functions in its
//! process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tokio::time::sleep;

use crate::faults::Scene;
use crate::faults::servers::Outcome;
use crate::history::Time;
use crate::plan::Plan;
use crate::support::{Deployment, Environment};

const SOURCE: &str = include_str!("clock.c");

/// The size of a step: longer than any lease.
pub const STEP: Duration = Duration::from_secs(10);

/// The file with the number of microseconds by which the server's clock is ahead.
pub struct Shim(PathBuf);

/// The environment to start the server with, if the plan steps its clock and a C compiler is there.
pub fn shim(plan: &Plan, directory: &Path) -> (Environment, Option<Shim>) {
    if !plan.faults.iter().any(|fault| fault.sets_clock()) {
        return (Environment::new(), None);
    }
    let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
    std::fs::write(&source, SOURCE).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status();
    if !built.is_ok_and(|status| status.success()) {
        println!("skipped: clock-forward, clock-back (no C compiler to build the preloaded library)");
        return (Environment::new(), None);
    }
    let offset = directory.join("clock");
    std::fs::write(&offset, 0_i64.to_ne_bytes()).unwrap();
    let words = [("LD_PRELOAD", &library), ("REDLATCH_CLOCK", &offset)];
    let environment = words.map(|(name, path)| (name.to_owned(), path.display().to_string()));
    (environment.to_vec(), Some(Shim(offset)))
}

impl Shim {
    /// Steps the clock of the server, and after a while steps it back.
    pub async fn step(&self, scene: &mut Scene<'_>, deployment: &Deployment, forward: bool) -> Outcome {
        let start = Time::now();
        let server = &deployment.masters()[0];
        let before: (i64, i64) = server.run(&["TIME"]).await;
        let micros = i64::try_from(STEP.as_micros()).unwrap();
        self.set(if forward { micros } else { -micros });
        let after: (i64, i64) = server.run(&["TIME"]).await;
        sleep(scene.millis(200, 1_500)).await;
        self.set(0);
        sleep(Duration::from_millis(20)).await;
        let stepped = after.0 - before.0;
        // A clock that is ahead expires leases early. When a clock that was behind steps back, the
        // leases granted meanwhile expire early.
        let lost = Some((start, Time::now()));
        Outcome { effect: (stepped.abs() > 5).then(|| format!("by {stepped} s")), lost, of: None, away: None }
    }

    fn set(&self, ahead: i64) {
        use std::io::Write;
        // In place, since the server has mapped the file.
        let mut file = std::fs::OpenOptions::new().write(true).open(&self.0).unwrap();
        file.write_all(&ahead.to_ne_bytes()).unwrap();
    }
}
