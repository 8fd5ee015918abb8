//! The way between clients and real servers, in memory: what passes, passes when it is let.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::connection::{CAPACITY, Line};
use super::server::Server;
use redlatch::simulation::{Dialled, dialled, stay_in_memory};

/// With a paused clock, a sleep ends once nobody in the runtime has anything left to do.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// How long anything may take here, while leases last for many times that.
const SOON: Duration = Duration::from_secs(6);

/// Whose connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Of the client whose futures are dropped.
    Subject,
    /// Of the one that is in its way, or finds what it has left.
    Rival,
}

/// Which of several things that may pass goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// What has been sent arrives before anybody hears of an answer.
    RequestsFirst,
    AnswersFirst,
    /// As the first, and of each connection one thing at a time: all answers are there at once.
    Together,
}

/// How a node is away for the subject, while its rival reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Away {
    /// Nothing passes.
    Silent,
    /// Connections break, and are refused.
    Refuses,
}

/// In place of one node.
pub(super) const ALL: usize = usize::MAX;

pub(super) struct Net {
    pub(super) servers: Vec<Server>,
    lines: RefCell<Vec<Line>>,
    dialled: RefCell<Vec<Dialled>>,
    order: Order,
    /// Which node the subject does not reach, or [`ALL`].
    away: Cell<Option<(usize, Away)>>,
    /// What was under way for the subject, at any point.
    passed: RefCell<BTreeSet<String>>,
}

impl Whose {
    fn word(self) -> &'static str {
        match self {
            Whose::Subject => "subject",
            Whose::Rival => "rival",
        }
    }

    fn has(self, address: &str) -> bool {
        address.starts_with(self.word())
    }
}

impl Net {
    /// From now on, this thread connects to nobody else.
    pub(super) fn before(servers: Vec<Server>, order: Order) -> Net {
        stay_in_memory();
        Net {
            servers,
            lines: RefCell::default(),
            dialled: RefCell::default(),
            order,
            away: Cell::new(None),
            passed: RefCell::default(),
        }
    }

    pub(super) fn urls(&self, whose: Whose) -> Vec<String> {
        let url = |place: usize| format!("redis://{}-{place}/", whose.word());
        (0..self.servers.len()).map(url).collect()
    }

    /// Lets one thing pass: a connection, a request or an answer. False if there is none.
    pub(super) fn step(&self, whose: Whose) -> bool {
        self.gather();
        if self.pick_up(whose) {
            return true;
        }
        let mut lines = self.lines.borrow_mut();
        let mut passable: Vec<_> =
            lines.iter_mut().filter(|line| whose.has(&line.address) && !self.holds_back(line)).collect();
        let all = self.order == Order::Together;
        let (mut delivered, mut answered) = (false, false);
        if self.order == Order::AnswersFirst {
            answered = pass(&mut passable, Line::answer, all);
        }
        if !answered {
            delivered = pass(&mut passable, Line::deliver, all);
        }
        if !answered && !delivered {
            answered = pass(&mut passable, Line::answer, all);
        }
        if delivered {
            // Whoever was told something by that has it in his line from now on.
            lines.iter_mut().for_each(Line::listen);
        }
        delivered || answered
    }

    /// Takes note of what is under way for the subject: each word, and `at` how many nodes.
    pub(super) fn note(&self) {
        self.gather();
        let mut under_way = BTreeMap::<String, BTreeSet<usize>>::new();
        for line in self.lines.borrow().iter().filter(|line| Whose::Subject.has(&line.address)) {
            for word in line.under_way() {
                let word = if self.holds_back(line) { format!("{word} held back") } else { word.to_owned() };
                under_way.entry(word).or_default().insert(line.place);
            }
        }
        for it in self.dialled.borrow().iter().filter(|it| Whose::Subject.has(&it.address)) {
            let word = match self.how_away(&it.address) {
                None => "connect",
                Some(Away::Silent) => "connect held back",
                Some(Away::Refuses) => "connect refused",
            };
            under_way.entry(word.to_owned()).or_default().insert(place(&it.address));
        }
        let mut passed = self.passed.borrow_mut();
        if under_way.is_empty() {
            passed.insert("nothing".to_owned());
        }
        passed.extend(under_way.iter().map(|(word, places)| format!("{word} at {}", places.len())));
    }

    /// What was noted since this was asked last.
    pub(super) fn passed(&self) -> BTreeSet<String> {
        self.passed.take()
    }

    fn gather(&self) {
        self.dialled.borrow_mut().extend(dialled());
        let mut lines = self.lines.borrow_mut();
        lines.iter_mut().for_each(Line::gather);
        lines.retain(|line| !line.is_over());
    }

    fn pick_up(&self, whose: Whose) -> bool {
        let mut dialled = self.dialled.borrow_mut();
        dialled.retain(|it| !it.pick_up.is_closed());
        let passes =
            |it: &Dialled| whose.has(&it.address) && self.how_away(&it.address) != Some(Away::Silent);
        let Some(first) = dialled.iter().position(passes) else { return false };
        let Dialled { address, pick_up } = dialled.remove(first);
        if self.how_away(&address).is_some() {
            return true; // refused
        }
        let place = place(&address);
        let (theirs, ours) = tokio::io::duplex(CAPACITY);
        self.lines.borrow_mut().push(Line::new(address, place, ours, self.servers[place].connect()));
        pick_up.send(theirs).ok();
        true
    }

    /// Cuts what the subject has. Its requests are on their way, or lost.
    pub(super) fn cut(&self, lost: bool) {
        self.gather();
        self.dialled.borrow_mut().retain(|it| !Whose::Subject.has(&it.address));
        for line in self.lines.borrow_mut().iter_mut().filter(|line| Whose::Subject.has(&line.address)) {
            line.cut();
            if lost {
                line.forget_requests();
            }
        }
    }

    /// From now on, nothing passes through the connections that the subject has.
    pub(super) fn hang(&self, hangs: bool) {
        self.gather();
        for line in self.lines.borrow_mut().iter_mut().filter(|line| Whose::Subject.has(&line.address)) {
            line.hangs = hangs;
        }
    }

    /// From now on, the subject does not reach a node.
    pub(super) fn lose(&self, place: usize, how: Away) {
        self.away.set(Some((place, how)));
        if how == Away::Refuses {
            self.gather();
            let mut lines = self.lines.borrow_mut();
            lines.iter_mut().filter(|line| self.how_away(&line.address).is_some()).for_each(Line::cut);
        }
    }

    /// Whatever was held back passes, and all nodes are there.
    pub(super) fn restore(&self) {
        self.away.set(None);
        self.hang(false);
    }

    fn how_away(&self, address: &str) -> Option<Away> {
        self.away
            .get()
            .filter(|(it, _)| Whose::Subject.has(address) && [ALL, place(address)].contains(it))
            .map(|(_, how)| how)
    }

    fn holds_back(&self, line: &Line) -> bool {
        line.hangs || self.how_away(&line.address) == Some(Away::Silent)
    }

    /// Lets everything pass until `work` is done, which must be soon.
    pub(super) async fn flow<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.let_pass(what, &[Whose::Rival, Whose::Subject], work).await
    }

    /// Lets everything pass but what the subject sends and hears.
    pub(super) async fn flow_beside<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.let_pass(what, &[Whose::Rival], work).await
    }

    async fn let_pass<T>(&self, what: &str, whose: &[Whose], work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        let (start, mut pause) = (Instant::now(), TICK);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(32 * TICK);
            for whose in whose {
                while self.step(*whose) {
                    pause = TICK;
                }
            }
            assert!(start.elapsed() < SOON, "not within {SOON:?}: {what}");
        }
    }

    /// Lets everything pass until it is so.
    pub(super) async fn eventually(&self, what: &str, is: impl Fn() -> bool) {
        let becomes = async {
            while !is() {
                sleep(8 * TICK).await;
            }
        };
        self.flow(what, becomes).await;
    }
}

/// Which node an address is of.
fn place(address: &str) -> usize {
    address.split(['-', ':']).nth(1).unwrap().parse().unwrap()
}

/// Lets one thing pass, or one of each line. False if there is none.
fn pass(lines: &mut [&mut Line], passes: fn(&mut Line) -> bool, all: bool) -> bool {
    if all {
        lines.iter_mut().filter_map(|line| passes(line).then_some(())).count() > 0
    } else {
        lines.iter_mut().any(|line| passes(line))
    }
}
