//! redlatch and other libraries, measured in turn on one server.
//!
//! In each round every library is measured once, in another order than in the round before: a
//! disturbance then affects all libraries alike. Figures are medians of the rounds.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Outcome;
use super::placement::{Cores, Placement};
use super::plan::Plan;
use super::program::{LANGUAGES, Library, Measured, Program};
use super::samples::median;
use super::server::{Observer, Server};

pub(crate) const TASKS: [usize; 4] = [1, 64, 256, 1024];
pub(crate) const CLIENTS: [usize; 4] = [2, 16, 64, 256];

/// The delays between two attempts of a library that polls, in milliseconds. A whole run measures
/// all of them for each number of clients, and takes the one with most turns.
pub(crate) const POLLS: [u64; 4] = [1, 2, 5, 20];

/// A kind of lock of a library.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Subject {
    pub(crate) library: String,
    pub(crate) kind: String,
}

impl Subject {
    pub(crate) fn new(library: &str, kind: &str) -> Subject {
        Subject { library: library.to_owned(), kind: kind.to_owned() }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.library == "redlatch"
    }

    /// Whether it is a lock for one holder at a time, and not one side of a read-write lock.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.kind != "read" && self.kind != "write"
    }

    pub(crate) fn title(&self) -> String {
        match (self.library.as_str(), self.kind.as_str()) {
            ("set-nx", _) => "SET NX PX, bare".to_owned(),
            ("redlatch", "unfenced") => "redlatch mutex, Fencing::Off".to_owned(),
            ("redlatch" | "Redisson" | "rlock" | "distkit", kind) => format!("{} {kind}", self.library),
            (library, _) => library.to_owned(),
        }
    }

    /// Whether there are limits for it, or it is what one of those is compared with.
    fn is_compared(&self) -> bool {
        ["redlatch", "rslock", "rlock"].contains(&self.library.as_str())
    }

    /// What the rate is divided by: rslock, or for the sides of a read-write lock, rlock.
    fn reference(&self) -> Subject {
        if self.is_exclusive() { Subject::new("rslock", "mutex") } else { Subject::new("rlock", &self.kind) }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct PairsRow {
    pub(crate) subject: Subject,
    pub(crate) tasks: usize,
    pub(crate) pairs_per_second: f64,
    /// The median of the rate divided by that of the reference in the same round.
    pub(crate) to_reference: f64,
    /// The same for the mutexes of rslock and rlock.
    pub(crate) to_mutexes: [f64; 2],
    pub(crate) server_us: f64,
    pub(crate) client_us: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct TurnsRow {
    pub(crate) subject: Subject,
    pub(crate) clients: usize,
    /// The delay between two attempts, of a library that polls.
    pub(crate) poll_ms: Option<u64>,
    pub(crate) turns_per_second: f64,
    /// The rate divided by that of the best other library.
    pub(crate) to_best_peer: f64,
    /// Fewest and most turns of one client, in the round with the median of their ratio.
    pub(crate) fewest: u64,
    pub(crate) most: u64,
}

impl TurnsRow {
    pub(crate) fn fairness(&self) -> f64 {
        self.fewest as f64 / self.most.max(1) as f64
    }
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Peers {
    /// Each library with its language.
    pub(crate) libraries: Vec<(String, Library)>,
    /// With a core for the server.
    pub(crate) pairs: Vec<PairsRow>,
    /// The same on shared cores, of redlatch and what it is compared with.
    pub(crate) on_shared_cores: Vec<PairsRow>,
    pub(crate) turns: Vec<TurnsRow>,
    /// What was left out, and why.
    pub(crate) notices: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Pairs {
    seconds: f64,
    pairs: u64,
    overlaps: u64,
}

#[derive(Debug, Deserialize)]
struct Turns {
    seconds: f64,
    turns: u64,
    fewest: u64,
    most: u64,
    overlaps: u64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Peers> {
    let mut run = Run {
        observer: server.observer().await?,
        programs: Vec::new(),
        peers: Peers::default(),
        server: server.process(),
        placement: Placement::Anywhere,
    };
    let url = server.url();
    for language in LANGUAGES {
        match Program::start(language, url.trim_end_matches('/')).await {
            Ok(Some(program)) => run.programs.push(program),
            Ok(None) => {
                run.notice(format!("the {language} program is not built: its libraries are left out"))
            }
            Err(error) => run.notice(format!("the {language} program does not start: {error}")),
        }
    }
    for program in &run.programs {
        let of_program = program.libraries.iter().map(|library| (program.language.clone(), library.clone()));
        run.peers.libraries.extend(of_program);
    }
    run.warm_up().await?;
    run.place(Placement::Apart)?;
    for tasks in TASKS {
        let rows = run.pairs(plan, tasks, |_| true).await?;
        run.peers.pairs.extend(rows);
    }
    run.place(Placement::Anywhere)?;
    for tasks in &TASKS[1..] {
        let rows = run.pairs(plan, *tasks, Subject::is_compared).await?;
        run.peers.on_shared_cores.extend(rows);
    }
    for clients in CLIENTS {
        run.turns(plan, clients).await?;
    }
    Ok(run.peers)
}

struct Run {
    observer: Observer,
    programs: Vec<Program>,
    peers: Peers,
    server: u32,
    placement: Placement,
}

impl Run {
    fn notice(&mut self, text: String) {
        if !self.peers.notices.contains(&text) {
            eprintln!("notice: {text}");
            self.peers.notices.push(text);
        }
    }

    /// The locks to measure, each with the index of its program.
    fn subjects(&self, of: impl Fn(&Library) -> Vec<String>) -> Vec<(usize, Subject)> {
        let mut subjects = Vec::new();
        for (program, libraries) in
            self.programs.iter().enumerate().map(|(at, program)| (at, &program.libraries))
        {
            for library in libraries {
                subjects.extend(of(library).iter().map(|kind| (program, Subject::new(&library.name, kind))));
            }
        }
        subjects
    }

    fn library(&self, name: &str) -> Option<&Library> {
        self.peers.libraries.iter().map(|(_, library)| library).find(|library| library.name == name)
    }

    /// Pins the server and the programs to cores, where that can be chosen.
    fn place(&mut self, placement: Placement) -> Outcome<()> {
        self.placement = placement;
        let Some(cores) = Cores::of(self.server) else {
            self.notice("the server had no core of its own: there is one core, or no `taskset`".to_owned());
            return Ok(());
        };
        let programs: Vec<u32> = self.programs.iter().map(Program::process).collect();
        cores.place_processes(placement, &programs)
    }

    /// Lets compilers at run time do their work before anything is measured.
    async fn warm_up(&mut self) -> Outcome<()> {
        for (program, subject) in self.subjects(|library| library.kinds.clone()) {
            self.measure::<Pairs>(
                program,
                &subject,
                &format!("pairs {} {} 64 0.3", subject.library, subject.kind),
            )
            .await?;
        }
        Ok(())
    }

    /// `None` after an error, which becomes a notice.
    async fn measure<T: serde::de::DeserializeOwned>(
        &mut self,
        program: usize,
        subject: &Subject,
        command: &str,
    ) -> Outcome<Option<Measured<T>>> {
        match self.programs[program].measure(std::slice::from_mut(&mut self.observer), command).await {
            Ok(measured) => Ok(Some(measured)),
            Err(error) if subject.is_ours() => Err(error),
            Err(error) => {
                self.notice(error.to_string());
                self.place(self.placement)?; // another process has taken its place
                Ok(None)
            }
        }
    }

    fn check_overlaps(&mut self, subject: &Subject, overlaps: u64) -> Outcome<()> {
        let text = format!("{}: two holders at once, {overlaps} times", subject.title());
        match overlaps {
            0 => Ok(()),
            _ if subject.is_ours() => Err(text.into()),
            _ => {
                self.notice(text);
                Ok(())
            }
        }
    }

    async fn pairs(
        &mut self,
        plan: &Plan,
        tasks: usize,
        is_included: impl Fn(&Subject) -> bool,
    ) -> Outcome<Vec<PairsRow>> {
        let mut subjects = self.subjects(|library| library.kinds.clone());
        // Read-write locks and locks for one holder behave alike with more tasks.
        subjects.retain(|(_, subject)| is_included(subject) && (tasks < 1024 || subject.is_exclusive()));
        let mut rounds = Vec::new();
        // With one task, a rate depends on how soon a core wakes up, and varies most.
        let more = if tasks == 1 { plan.peer_rounds - 1 } else { 0 };
        for round in 0..plan.peer_rounds + more {
            let mut rates = BTreeMap::new();
            for turn in 0..subjects.len() {
                let (program, subject) = &subjects[(turn + round * 5) % subjects.len()];
                let Subject { library, kind } = subject;
                let command = format!("pairs {library} {kind} {tasks} {}", plan.peer_slice.as_secs_f64());
                let Some(measured) = self.measure::<Pairs>(*program, subject, &command).await? else {
                    continue;
                };
                self.check_overlaps(subject, measured.result.overlaps)?;
                let pairs = measured.result.pairs as f64;
                let us = |time: Duration| time.as_secs_f64() * 1e6 / pairs;
                let rate = pairs / measured.result.seconds;
                rates.insert(subject.clone(), (rate, us(measured.server_cpu), us(measured.client_cpu)));
            }
            rounds.push(rates);
        }
        let mut rows = Vec::new();
        for (_, subject) in &subjects {
            let values: Vec<_> = rounds.iter().filter_map(|rates| rates.get(subject)).collect();
            if values.is_empty() {
                continue;
            }
            let ratio = |reference: &Subject| {
                let both =
                    rounds.iter().filter_map(|rates| Some((rates.get(subject)?.0, rates.get(reference)?.0)));
                median(both.map(|(ours, theirs)| ours / theirs).collect())
            };
            rows.push(PairsRow {
                subject: subject.clone(),
                tasks,
                pairs_per_second: median(values.iter().map(|value| value.0).collect()),
                to_reference: ratio(&subject.reference()),
                to_mutexes: ["rslock", "rlock"].map(|library| ratio(&Subject::new(library, "mutex"))),
                server_us: median(values.iter().map(|value| value.1).collect()),
                client_us: median(values.iter().map(|value| value.2).collect()),
            });
        }
        Ok(rows)
    }

    async fn turns(&mut self, plan: &Plan, clients: usize) -> Outcome<()> {
        let subjects = self.subjects(|library| match library.most_clients >= clients {
            true => library.turns.clone(),
            false => Vec::new(),
        });
        let mut polls = BTreeMap::new();
        for (program, subject) in &subjects {
            if self.library(&subject.library).is_some_and(|library| library.waiting.starts_with("polls")) {
                polls.insert(subject.clone(), self.best_poll(plan, *program, subject, clients).await?);
            }
        }
        let mut results: BTreeMap<&Subject, Vec<Turns>> = BTreeMap::new();
        for round in 0..plan.peer_rounds {
            for turn in 0..subjects.len() {
                let (program, subject) = &subjects[(turn + round * 5) % subjects.len()];
                let poll = polls.get(subject).copied().unwrap_or(POLLS[0]);
                let span = plan.peer_window;
                if let Some(turns) = self.window(*program, subject, clients, poll, span).await? {
                    results.entry(subject).or_default().push(turns);
                }
            }
        }
        let rate = |turns: &[Turns]| median(turns.iter().map(|run| run.turns as f64 / run.seconds).collect());
        let best = results.iter().filter(|(subject, _)| !subject.is_ours()).map(|(_, turns)| rate(turns));
        let best = best.fold(f64::NAN, f64::max);
        for (_, subject) in &subjects {
            let Some(mut turns) = results.remove(subject) else { continue };
            let turns_per_second = rate(&turns);
            let fairness = |turns: &Turns| turns.fewest as f64 / turns.most.max(1) as f64;
            turns.sort_by(|one, other| fairness(one).total_cmp(&fairness(other)));
            let middle = &turns[turns.len() / 2];
            self.peers.turns.push(TurnsRow {
                subject: subject.clone(),
                clients,
                poll_ms: polls.get(subject).copied(),
                turns_per_second,
                to_best_peer: turns_per_second / best,
                fewest: middle.fewest,
                most: middle.most,
            });
        }
        Ok(())
    }

    /// The delay with which this library has most turns. A quick run does not look for it.
    async fn best_poll(
        &mut self,
        plan: &Plan,
        program: usize,
        subject: &Subject,
        clients: usize,
    ) -> Outcome<u64> {
        if plan.is_quick() {
            return Ok(match clients {
                ..=2 => 1,
                3..=16 => 2,
                17..=64 => 5,
                _ => 20,
            });
        }
        let mut best = (POLLS[0], 0);
        for poll in POLLS {
            let window = self.window(program, subject, clients, poll, plan.peer_window / 2).await?;
            let turns = window.map_or(0, |window| window.turns);
            if turns > best.1 {
                best = (poll, turns);
            }
        }
        Ok(best.0)
    }

    async fn window(
        &mut self,
        program: usize,
        subject: &Subject,
        clients: usize,
        poll: u64,
        span: Duration,
    ) -> Outcome<Option<Turns>> {
        let Subject { library, kind } = subject;
        let command = format!("turns {library} {kind} {clients} {} {poll}", span.as_secs_f64());
        let Some(measured) = self.measure::<Turns>(program, subject, &command).await? else {
            return Ok(None);
        };
        self.check_overlaps(subject, measured.result.overlaps)?;
        Ok(Some(measured.result))
    }
}

/// Each of these once, in their order.
pub(crate) fn subjects<'a>(all: impl Iterator<Item = &'a Subject>) -> Vec<&'a Subject> {
    let mut subjects = Vec::new();
    for subject in all {
        if !subjects.contains(&subject) {
            subjects.push(subject);
        }
    }
    subjects
}
