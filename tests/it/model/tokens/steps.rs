//! The possible steps from a state.

use super::protocols::{Recreate, Repair, Request, Rules, TokenChoice};
use super::state::{
    ARRIVED, COPIED, DONE, FINISHED, FIRST, FREE, HELD, IDLE, MAX, OVER, PHASE, READS, REPAIRS, SECOND,
    SENDS, SHARED, State, TAKES, get, set,
};

/// The limit of the nodes' counters.
const FAR: u32 = 9;

/// A step; attempts and nodes are indices in the state before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Begin {
        one: usize,
        sends: u32,
    },
    Grant {
        one: usize,
        node: usize,
        answer: u32,
    },
    /// A request that arrives late or once more, or whose answer is lost.
    LostReply {
        one: usize,
        node: usize,
        sent: u32,
    },
    Take {
        one: usize,
        takes: u32,
    },
    Acquire {
        one: usize,
        token: u32,
    },
    Recreate {
        one: usize,
        node: usize,
    },
    Expire {
        writer: Option<usize>,
        node: usize,
    },
    Crash {
        node: usize,
        left: u32,
    },
    Wait {
        node: usize,
    },
    Copy {
        node: usize,
        from: usize,
    },
}

impl Step {
    /// Describes the step; the functions name attempts and nodes by their indices.
    pub fn describe(self, name: impl Fn(usize) -> String, node_name: impl Fn(usize) -> String) -> String {
        match self {
            Step::Begin { one, sends: 0 } => format!("{} begins", name(one)),
            Step::Begin { one, sends } => format!("{} begins, and sends {sends}", name(one)),
            Step::Grant { one, node, answer } => {
                format!("{} grants {}, and answers {answer}", node_name(node), name(one))
            }
            Step::LostReply { one, node, sent } => {
                format!("{} serves the {sent} of {}, whose answer is lost", node_name(node), name(one))
            }
            Step::Take { one, takes } => format!("{} takes {takes}, and sends that", name(one)),
            Step::Acquire { one, token } => format!("{} has the lock, with the token {token}", name(one)),
            Step::Recreate { one, node } => {
                format!("{} re-creates its key on {}", name(one), node_name(node))
            }
            Step::Expire { writer: Some(one), node } => {
                format!("the lease of {} on {} expires", name(one), node_name(node))
            }
            Step::Expire { writer: None, node } => {
                format!("the readers' leases on {} expire", node_name(node))
            }
            Step::Crash { node, left } => format!("{} crashes, and remembers {left}", node_name(node)),
            Step::Wait { node } => format!("{} has waited longer than every TTL", node_name(node)),
            Step::Copy { node, from } => format!("{} copies from {}", node_name(node), node_name(from)),
        }
    }
}

/// Steps, each with the state that it leads to.
pub type Next = Vec<(Step, State)>;

impl State {
    /// All possible steps. Refusals are left out: a refusal changes no node, and an attempt that
    /// knows of it can do no more than one whose request never arrives. Releases are left out: a
    /// release has the effect of an expiry.
    pub fn steps(&self, rules: &Rules, next: &mut Next) {
        for one in 0..rules.attempts.len() {
            match get(self.attempts[one], PHASE) {
                IDLE => {
                    // Equal attempts begin in the order of their indices.
                    if one == 0 || self.attempts[one - 1] != self.attempts[one] {
                        self.begin(rules, one, next);
                    }
                    continue;
                }
                FIRST => self.decide(rules, one, next),
                SECOND if self.answered(one, |_| true) >= rules.majority => {
                    self.acquire(rules, one, self.token(one), next);
                }
                DONE if rules.recreate != Recreate::Never => self.recreate(rules, one, next),
                _ => {}
            }
            self.arrive(rules, one, next);
        }
        for node in 0..rules.nodes {
            self.expire(node, next);
            self.crash(rules, node, next);
        }
    }

    fn begin(&self, rules: &Rules, one: usize, next: &mut Next) {
        let reads = get(self.attempts[one], READS) == 1;
        let proposals = if rules.way(reads).first.proposes() { 1..=rules.proposals } else { 0..=0 };
        for sends in proposals {
            let mut after = *self;
            let word = &mut after.attempts[one];
            set(word, PHASE, FIRST);
            set(word, SENDS, sends);
            set(word, FINISHED, self.finished(reads));
            next.push((Step::Begin { one, sends }, after));
        }
    }

    /// A majority has answered. Further answers may be in flight, so any majority may be the one
    /// that the attempt receives.
    fn decide(&self, rules: &Rules, one: usize, next: &mut Next) {
        let way = rules.way(get(self.attempts[one], READS) == 1);
        if way.take == TokenChoice::Own {
            if self.answered(one, |_| true) >= rules.majority {
                self.acquire(rules, one, self.token(one), next);
            }
            return;
        }
        for (node, word) in self.nodes.iter().enumerate() {
            let Some(largest) = get(*word, one).checked_sub(1) else { continue };
            let is_known = self.nodes[..node].iter().any(|before| get(*before, one) == largest + 1);
            if is_known || self.answered(one, |answer| answer <= largest) < rules.majority {
                continue;
            }
            let takes = largest + u32::from(way.take == TokenChoice::Next);
            if way.second.is_none() {
                self.acquire(rules, one, takes, next);
                continue;
            }
            let mut after = *self;
            set(&mut after.attempts[one], PHASE, SECOND);
            set(&mut after.attempts[one], TAKES, takes);
            for word in &mut after.nodes {
                // A node that answered with this number has it.
                let has = get(*word, one) > takes;
                set(word, one, if has { takes + 1 } else { 0 });
            }
            next.push((Step::Take { one, takes }, after));
        }
    }

    fn acquire(&self, rules: &Rules, one: usize, token: u32, next: &mut Next) {
        let mut after = *self;
        if token != get(self.attempts[one], SENDS) {
            set(&mut after.attempts[one], TAKES, token);
        }
        after.end(one, DONE, rules);
        next.push((Step::Acquire { one, token }, after));
    }

    /// The requests of an attempt that may arrive.
    fn arrive(&self, rules: &Rules, one: usize, next: &mut Next) {
        let word = self.attempts[one];
        let way = rules.way(get(word, READS) == 1);
        let phase = get(word, PHASE);
        let second = way.second.filter(|_| get(word, TAKES) != 0);
        let (request, sent) = match second {
            Some(request) => (request, get(word, TAKES)),
            None => (way.first, get(word, SENDS)),
        };
        for node in 0..rules.nodes {
            if get(self.nodes[node], REPAIRS) != 0 {
                continue;
            }
            let pending = get(self.nodes[node], one) == 0;
            if let Some((answer, after)) =
                self.serve(request, sent, one, node).filter(|_| pending || rules.twice)
            {
                let is_awaited = pending && matches!(phase, FIRST | SECOND);
                if is_awaited {
                    let mut after = after;
                    // In the second round, only the fact of an answer matters.
                    let answer = if second.is_some() { sent } else { answer };
                    set(&mut after.nodes[node], one, answer + 1);
                    next.push((Step::Grant { one, node, answer }, after));
                }
                if after != *self && (rules.twice || !is_awaited) {
                    let mut after = after;
                    if !rules.twice {
                        set(&mut after.nodes[node], one, ARRIVED);
                    }
                    next.push((Step::LostReply { one, node, sent }, after));
                }
            }
            if second.is_some() && rules.twice {
                let sent = get(word, SENDS);
                let served = self.serve(way.first, sent, one, node).filter(|(_, after)| after != self);
                next.extend(served.map(|(_, after)| (Step::LostReply { one, node, sent }, after)));
            }
        }
    }

    /// A node's answer and the state after it, unless the node refuses.
    fn serve(&self, request: Request, sent: u32, one: usize, node: usize) -> Option<(u32, State)> {
        let (held, max) = (get(self.nodes[node], HELD), get(self.nodes[node], MAX));
        let holder = self.holder(one);
        let may = held == FREE || held == holder;
        let (granted, max) = match request {
            Request::Accept => (may && (sent > max || sent == max && held == holder), sent),
            Request::AcceptEqual => (may && sent >= max, sent),
            Request::Count => (may && max < FAR, max + 1),
            Request::Look => (may && max < FAR, max),
            Request::Share => (may, max.max(sent)),
            Request::Store => (true, max.max(sent)),
        };
        let mut after = *self;
        set(&mut after.nodes[node], MAX, max);
        if request != Request::Store {
            set(&mut after.nodes[node], HELD, holder);
        }
        granted.then_some((max, after))
    }

    fn holder(&self, one: usize) -> u32 {
        if get(self.attempts[one], READS) == 1 { SHARED } else { one as u32 + 1 }
    }

    /// Only a holder with a valid lease sends a re-creation, but the request may arrive at any
    /// time.
    fn recreate(&self, rules: &Rules, one: usize, next: &mut Next) {
        let (token, holder) = (self.token(one), self.holder(one));
        for node in 0..rules.nodes {
            let (held, max) = (get(self.nodes[node], HELD), get(self.nodes[node], MAX));
            let missing = held == FREE || held == SHARED && holder == SHARED && max != token;
            let votes = get(self.nodes[node], REPAIRS) == 0;
            if votes && missing && (max <= token || rules.recreate == Recreate::Anywhere) {
                let mut after = *self;
                set(&mut after.nodes[node], MAX, token);
                set(&mut after.nodes[node], HELD, holder);
                next.push((Step::Recreate { one, node }, after));
            }
        }
    }

    fn expire(&self, node: usize, next: &mut Next) {
        let held = get(self.nodes[node], HELD);
        if held != FREE {
            let mut after = *self;
            set(&mut after.nodes[node], HELD, FREE);
            let writer = (held != SHARED).then(|| held as usize - 1);
            next.push((Step::Expire { writer, node }, after));
        }
    }

    /// A node loses data, or repairs that. A crash without loss needs no step: it has the effect of
    /// expired leases and late requests.
    fn crash(&self, rules: &Rules, node: usize, next: &mut Next) {
        let word = self.nodes[node];
        let Some(repairs_done) = get(word, REPAIRS).checked_sub(1) else {
            if self.crashes > 0 && self.nodes.iter().all(|node| get(*node, REPAIRS) == 0) {
                for left in 0..get(word, MAX) {
                    let mut after = *self;
                    after.crashes -= 1;
                    set(&mut after.nodes[node], MAX, left);
                    set(&mut after.nodes[node], HELD, FREE);
                    after.repair_ends(rules, node, 0);
                    next.push((Step::Crash { node, left }, after));
                }
            }
            return;
        };
        match rules.repairs[repairs_done as usize] {
            Repair::Wait => {
                let mut after = *self;
                for one in 0..rules.attempts.len() {
                    let live = matches!(get(self.attempts[one], PHASE), FIRST | SECOND);
                    if live && get(word, one) != 0 {
                        after.end(one, OVER, rules);
                    }
                }
                after.repair_ends(rules, node, repairs_done + 1);
                next.push((Step::Wait { node }, after));
            }
            Repair::Copy => {
                let others = (0..rules.nodes).filter(|from| *from != node);
                for from in others.filter(|from| get(self.nodes[*from], COPIED) == 0) {
                    let mut after = *self;
                    let max = get(word, MAX).max(get(self.nodes[from], MAX));
                    set(&mut after.nodes[node], MAX, max);
                    set(&mut after.nodes[from], COPIED, 1);
                    let copied = after.nodes.iter().filter(|node| get(**node, COPIED) == 1).count();
                    if copied > (rules.nodes - 1) / 2 {
                        after.nodes.iter_mut().for_each(|node| set(node, COPIED, 0));
                        after.repair_ends(rules, node, repairs_done + 1);
                    }
                    next.push((Step::Copy { node, from }, after));
                }
            }
        }
    }

    /// A node votes again once all repair steps are done.
    fn repair_ends(&mut self, rules: &Rules, node: usize, repairs_done: u32) {
        let more = (repairs_done as usize) < rules.repairs.len();
        set(&mut self.nodes[node], REPAIRS, if more { repairs_done + 1 } else { 0 });
    }
}
