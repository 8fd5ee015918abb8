//! `redlatch run` and its watchdog, of which neither can act: each of them is stopped or killed.
//! Nothing else looks after the command, so it runs on until one of them resumes.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{RunningProgram, ends, is_alive, is_held, on, pid, run_on, watchdog_of};
use crate::run_escape::cgroup_of;
use crate::support::{Server, eventually, soon};

/// Records in the first file that it runs, and each TERM, which it survives. Once the second file
/// is gone, it ends by itself, also after a test that has failed. Prints its process id.
const COMMAND: &str = "trap 'echo term >>\"$0\"' TERM; echo $$
    while [ -e \"$1\" ]; do echo runs >>\"$0\"; sleep 0.05; done; echo ended >>\"$0\"";

#[derive(Clone, Copy, Debug)]
enum Step {
    /// `run` gets a signal.
    Run(Signal),
    Watchdog(Signal),
    /// The lock is revoked, so that `run` sends TERM at its next renewal.
    Revoke,
    /// Waits until the command has got TERM: it is in the grace then.
    Term,
}
use Step::{Revoke, Run, Term, Watchdog};

/// A command, and those that guard it.
struct Job {
    steps: &'static [Step],
    name: String,
    running: RunningProgram,
    run: Pid,
    watchdog: Pid,
    command: Pid,
    log: PathBuf,
}

impl Job {
    async fn start(server: &Server, folder: &Path, name: &str, steps: &'static [Step]) -> Job {
        let log = folder.join(name);
        let on_file = folder.join("on");
        let paths = [log.to_str().unwrap(), on_file.to_str().unwrap()];
        let words = ["run", "--ttl", "6s", "--grace", "3s", name, "--", "sh", "-c", COMMAND];
        let mut running = RunningProgram::start(on(server, &[&words[..], &paths].concat()));
        let command = pid(&running.line().await);
        let run = running.pid();
        let watchdog = watchdog_of(run).unwrap();
        let name = name.to_owned();
        let mut job = Job { steps, name, running, run, watchdog, command, log };
        for step in steps {
            job.take(server, *step).await;
        }
        job
    }

    async fn take(&mut self, server: &Server, step: Step) {
        match step {
            Run(Signal::KILL) => self.running.child.kill().await.unwrap(),
            Run(signal) => kill_process(self.run, signal).unwrap(),
            Watchdog(signal) => kill_process(self.watchdog, signal).unwrap(),
            Revoke => {
                assert!(server.locks().await.mutex(&self.name).unwrap().force_release().await.unwrap());
            }
            Term => eventually("TERM", || async { self.terms() > 0 }).await,
        }
    }

    fn log(&self) -> String {
        read_to_string(&self.log).unwrap_or_default()
    }

    fn terms(&self) -> usize {
        self.log().matches("term").count()
    }

    /// Waits until the command has run on. It has recorded an earlier TERM by then.
    async fn goes_on(&self) {
        let before = self.log().matches("runs").count();
        eventually("the command goes on", || async { self.log().matches("runs").count() >= before + 2 })
            .await;
    }

    fn has(&self, step: fn(&Step) -> bool) -> bool {
        self.steps.iter().any(step)
    }
}

/// Starts commands that nothing guards, and waits until their leases are over, and the time of KILL
/// of those that are in their grace, which are the first ones. All of them run beside the next
/// holder, and have got no signal since.
async fn unguarded(server: &Server, folder: &Path, cases: &[&'static [Step]]) -> Vec<Job> {
    std::fs::write(folder.join("on"), "").unwrap();
    let mut jobs = Vec::new();
    for (place, steps) in cases.iter().enumerate() {
        jobs.push(Job::start(server, folder, &format!("job-{place}"), steps).await);
    }
    for job in &jobs {
        is_held(server, &job.name, false).await;
        let next = run_on(server, &["run", "-n", &job.name, "--", "true"]).await;
        assert_eq!(next.code, 0, "{:?}: {next:?}", job.steps);
    }
    for job in &jobs {
        job.goes_on().await;
        let expected = usize::from(job.has(|step| matches!(step, Term)));
        assert_eq!(job.terms(), expected, "{:?}", job.steps);
    }
    jobs
}

/// `run` is stopped first, or it would replace its watchdog.
#[tokio::test(flavor = "multi_thread")]
async fn unguarded_command_ends_at_once_when_one_of_both_resumes() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[Step], Step); 7] = [
        (&[Revoke, Term, Run(Signal::STOP), Watchdog(Signal::KILL)], Run(Signal::CONT)),
        (&[Revoke, Term, Run(Signal::STOP), Watchdog(Signal::STOP)], Watchdog(Signal::CONT)),
        (&[Run(Signal::STOP), Watchdog(Signal::KILL)], Run(Signal::CONT)),
        (&[Run(Signal::STOP), Watchdog(Signal::STOP)], Run(Signal::CONT)),
        (&[Run(Signal::STOP), Watchdog(Signal::STOP)], Watchdog(Signal::CONT)),
        (&[Run(Signal::STOP), Watchdog(Signal::STOP), Run(Signal::KILL)], Watchdog(Signal::CONT)),
        (&[Run(Signal::KILL), Term, Watchdog(Signal::STOP)], Watchdog(Signal::CONT)),
    ];
    let mut jobs = unguarded(&server, folder.path(), &cases.map(|(steps, _)| steps)).await;
    // A command that has its grace, the longest of this TTL, outlives all of them.
    let mut with_grace = Job::start(&server, folder.path(), "grace", &[]).await;
    for (job, (_, resumes)) in jobs.iter_mut().zip(cases) {
        job.take(&server, resumes).await;
    }
    with_grace.take(&server, Run(Signal::KILL)).await;
    ends(with_grace.command).await;
    for job in &jobs {
        assert!(!is_alive(job.command), "{:?}", job.steps);
    }
    for mut job in jobs {
        if job.has(|step| matches!(step, Run(Signal::KILL))) {
            soon("the run ends", job.running.child.wait()).await.unwrap();
            continue;
        }
        job.take(&server, Run(Signal::CONT)).await;
        let ended = job.running.end().await;
        assert_eq!(ended.code, 75, "{:?}: {ended:?}", job.steps);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn command_runs_until_it_ends_by_itself_if_run_and_the_watchdog_are_killed() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let cases: [&[Step]; 3] = [
        &[Revoke, Term, Run(Signal::STOP), Watchdog(Signal::KILL), Run(Signal::KILL)],
        &[Run(Signal::STOP), Watchdog(Signal::KILL), Run(Signal::KILL)],
        &[Run(Signal::KILL), Term, Watchdog(Signal::KILL)],
    ];
    let jobs = unguarded(&server, folder.path(), &cases).await;
    let cgroups: Vec<_> = jobs.iter().filter_map(|job| cgroup_of(job.command)).collect();
    std::fs::remove_file(folder.path().join("on")).unwrap();
    for job in &jobs {
        ends(job.command).await;
        assert!(job.log().ends_with("ended\n"), "{:?}: {}", job.steps, job.log());
    }
    // Nothing removes it, until a `run` around it does.
    for cgroup in cgroups {
        assert!(cgroup.exists());
        eventually("the cgroup is removed", || async { std::fs::remove_dir(&cgroup).is_ok() }).await;
    }
}
