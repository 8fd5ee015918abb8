//! The rules that hold after every step.

use super::clients::{Fencing, Scenario};
use super::lock_state::{Hold, Mode, ParsedState, ServerState};
use super::steps::{Answer, ClientView, Move, State};
use Answer::{Busy, Final};
use ClientView::{Done, Ended, Idle, Lost, Reads, Refused, Waits, Writes};

macro_rules! must {
    ($holds:expr, $($what:tt)+) => { if !$holds { return Err(format!($($what)+)); } };
}

impl ServerState {
    /// Whether a hold or the queue names an attempt.
    pub fn names(&self, one: usize) -> bool {
        let held = |hold: &Option<Hold>| hold.as_ref().is_some_and(|hold| hold.attempts.contains(&one));
        held(&self.write) || self.reads.iter().any(held) || self.queued(one).is_some()
    }
}

/// Judges a request that was delivered twice, and returns the state after it.
pub fn judge(
    scenario: &Scenario,
    before: &State,
    step: Move,
    answers: [Answer; 2],
    seen: [ParsedState; 2],
) -> Result<State, String> {
    let [first, second] = seen;
    let (once, mut twice) = (first.server_state.swept(), second.server_state.swept());
    // A reader is granted the largest known token, and the first delivery may have made a larger
    // one for a writer that turned out to be disconnected.
    if matches!(step, Move::Try(one) | Move::Ask(one) | Move::LostReply(one) if !scenario.attempts[one].writes)
        && scenario.fencing == Fencing::Proposed
        && twice.token == once.counter
    {
        twice.token = once.token;
    }
    must!(once == twice, "a second delivery changes more: {}", once.change(&twice, scenario));
    let [answer, again] = answers;
    let alike = match (step, answer) {
        (Move::Downgrade(_), Final(1..)) => matches!(again, Final(1..)),
        (Move::Release(one) | Move::Leave(one), _) if !scenario.attempts[one].has_late_requests => {
            again == Final(0)
        }
        // The first delivery may have granted the owner's write, with a newer token.
        (Move::Try(one) | Move::Ask(one) | Move::LostReply(one), Final(token @ 1..))
            if !scenario.attempts[one].writes =>
        {
            matches!(again, Final(newer) if newer >= token)
        }
        (_, Busy(_)) => matches!(again, Busy(_)),
        _ => again == answer,
    };
    must!(alike, "the second delivery gets the answer {again:?}, not {answer:?}");
    let views = learn(scenario, before, step, answer, &first)?;
    let written = tokens(scenario, before, step, &first.server_state)?;
    let mut noted = before.noted.clone();
    if let (Move::Ask(one), Busy(time)) = (step, answer) {
        noted[one].get_or_insert(time);
    }
    let after = State { server_state: first.server_state, views, written, noted };
    consistent(scenario, &after)?;
    fair(scenario, before, step, &after)?;
    dead(scenario, before, step, &after.server_state)?;
    Ok(after)
}

/// Judges a request that was delivered late or once more, and must change nothing.
pub fn judge_idle(
    scenario: &Scenario,
    before: &State,
    step: Move,
    answer: Answer,
    seen: &ParsedState,
) -> Result<(), String> {
    let server_state = &before.server_state;
    let (was, is) = (server_state.swept(), seen.server_state.swept());
    must!(was == is, "the request must change nothing: {}", was.change(&is, scenario));
    let expected = match step {
        Move::Renew(one) | Move::Downgrade(one) if before.views[one].holds() => {
            must!(seen.lasting.contains(&one), "the hold does not last for a TTL");
            matches!(answer, Final(1..))
        }
        Move::Renew(one) if matches!(before.views[one], Lost | Refused) => match answer {
            Final(1..) => server_state.holds(scenario, one),
            _ => answer == Final(0) && !server_state.holds(scenario, one),
        },
        Move::Renew(_) | Move::Downgrade(_) => answer == Final(0),
        Move::Release(one) => Some(answer) == server_state.ended[one].map(Final),
        Move::LostReply(_) => answer == Final(-1),
        _ => false,
    };
    must!(expected, "the answer {answer:?} is unexpected");
    Ok(())
}

impl ServerState {
    fn holds(&self, scenario: &Scenario, one: usize) -> bool {
        let has = |hold: Option<&Hold>| hold.is_some_and(|hold| hold.attempts.contains(&one));
        has(self.writes()) || has(self.reads(scenario.attempts[one].owner))
    }
}

/// The clients' views after a request.
fn learn(
    scenario: &Scenario,
    before: &State,
    step: Move,
    answer: Answer,
    seen: &ParsedState,
) -> Result<Vec<ClientView>, String> {
    let mut views = before.views.clone();
    let server_state = &seen.server_state;
    match (step, answer) {
        (Move::Try(one) | Move::Ask(one), Final(token)) if token >= scenario.least_token() => {
            let newest = server_state.counter.unwrap_or(0);
            let least = if scenario.attempts[one].writes { newest } else { before.written };
            let known = scenario.fencing == Fencing::Off || (least..=newest).contains(&token);
            must!(known, "granted with the token {token}, the last token is {newest}");
            must!(seen.lasting.contains(&one), "granted for less than a TTL");
            views[one] = if scenario.attempts[one].writes { Writes(token) } else { Reads(token) };
        }
        (Move::Try(_), Busy(_)) => {}
        (Move::Ask(one), Busy(_)) => {
            let upgrader = before
                .server_state
                .upgrade
                .filter(|(live, owner)| *live && server_state.reads(*owner).is_some());
            let refused = upgrader.is_some_and(|(_, owner)| owner != scenario.attempts[one].owner)
                && deadlock(scenario, before, server_state, one);
            must!(
                !refused || !scenario.attempts[one].writes,
                "a writer waits for an upgrader that waits for it"
            );
            views[one] = Waits;
        }
        (Move::LostReply(one), _) if !matches!(answer, Final(token) if token < scenario.least_token()) => {
            match (views[one], answer) {
                (Idle, _) => views[one] = Waits,
                (Reads(token) | Writes(token), _) => {
                    must!(seen.lasting.contains(&one), "the hold does not last for a TTL");
                    let least = token.max(scenario.least_token());
                    must!(
                        matches!(answer, Final(answer) if answer >= least),
                        "the hold has the token {token}"
                    );
                }
                _ => {}
            }
        }
        // The hold was downgraded since: the answer must not be taken for a write grant.
        (Move::LostReply(one), Final(-1))
            if scenario.attempts[one].writes && matches!(views[one], Reads(_)) => {}
        (Move::Try(one) | Move::Ask(one) | Move::LostReply(one), Final(-6)) => {
            must!(deadlock(scenario, before, server_state, one), "refused as a deadlock, but it is none");
            if let Move::Ask(one) = step {
                views[one] = Refused;
            }
        }
        (Move::Release(one) | Move::Leave(one), Final(answer @ 0..)) => {
            must!(answer > 0 || !views[one].holds(), "the release of a hold gets the answer 0");
            must!(
                answer == 0 || views[one] != Done,
                "the release of a released attempt gets the answer {answer}"
            );
            views[one] = if scenario.attempts[one].has_late_requests { Ended } else { Done };
        }
        (Move::Downgrade(one), Final(1..)) => {
            must!(seen.lasting.contains(&one), "downgraded for less than a TTL");
            let Writes(token) = views[one] else { unreachable!("only what is held to write is downgraded") };
            let last = match scenario.fencing {
                Fencing::Counted => Some(token) == server_state.counter,
                Fencing::Proposed => Some(token) <= server_state.counter,
                Fencing::Off => true,
            };
            must!(last, "held with the token {token}, the last token is {:?}", server_state.counter);
            views[one] = Reads(token);
        }
        (Move::ForceReaders | Move::ForceWriter, Final(1..)) => {
            for view in &mut views {
                if matches!((step, *view), (Move::ForceReaders, Reads(_)) | (Move::ForceWriter, Writes(_))) {
                    *view = Lost;
                }
            }
        }
        _ => return Err(format!("the answer {answer:?} is unexpected")),
    }
    Ok(views)
}

/// Whether the owner of this attempt reads, and so does another owner that waits to write.
fn deadlock(scenario: &Scenario, before: &State, server_state: &ServerState, one: usize) -> bool {
    let owner = scenario.attempts[one].owner;
    server_state.reads(owner).is_some()
        && scenario.attempts.iter().zip(&before.views).any(|(other, view)| {
            let wants =
                other.writes && (*view == Waits || other.has_late_requests && matches!(view, Lost | Refused));
            other.owner != owner && wants && server_state.reads(other.owner).is_some()
        })
}

/// Checks exclusion, and that holds, queue and marks agree with the clients' views.
pub fn consistent(scenario: &Scenario, state: &State) -> Result<(), String> {
    let server_state = &state.server_state;
    for (one, view) in state.views.iter().enumerate() {
        let Writes(_) = view else { continue };
        for (other, view) in state.views.iter().enumerate() {
            let both = view.holds() && scenario.attempts[one].owner != scenario.attempts[other].owner;
            let (one, other) = (scenario.attempts[one].name, scenario.attempts[other].name);
            must!(!both, "{one} writes, and {other} believes to hold the lock as well");
        }
    }
    if let Some(write) = server_state.writes() {
        for owner in (0..scenario.owners.len()).filter(|owner| *owner != write.owner) {
            let (writer, reader) = (scenario.owners[write.owner], scenario.owners[owner]);
            must!(server_state.reads(owner).is_none(), "{writer} writes, and {reader} reads");
        }
    }
    let writers = server_state.waiters(scenario, true);
    let gated = server_state.writer_wait_until == Some(true);
    must!(!gated || !writers.is_empty(), "new readers are kept out, but no live writer waits");
    if let Some((true, owner)) = server_state.upgrade {
        let waits = writers.iter().any(|one| scenario.attempts[*one].owner == owner);
        must!(waits, "{} has the upgrade's mark, but does not wait", scenario.owners[owner]);
    }
    let fields = server_state.reads.iter().flatten().count() as i64;
    must!(
        server_state.mode == Mode::Sole || server_state.readers.unwrap_or(0) == fields,
        "{fields} readers are counted as {:?}",
        server_state.readers
    );
    for (one, attempt) in scenario.attempts.iter().enumerate() {
        let places = |hold: &Option<Hold>, is_live: bool| {
            let hold = hold.as_ref().filter(|hold| hold.is_live == is_live);
            hold.map_or(0, |hold| hold.attempts.iter().filter(|named| **named == one).count())
        };
        let read = |live| server_state.reads.iter().map(|hold| places(hold, live)).sum::<usize>();
        let (reads, writes) = (read(true), places(&server_state.write, true));
        let over = read(false) + places(&server_state.write, false);
        let queued = server_state.queue.iter().filter(|(named, _)| *named == one).count();
        let all = reads + writes + queued;
        let right = match state.views[one] {
            Idle | Done => all + over == 0,
            Ended => all == 0,
            Waits | Refused => all <= 1 && if attempt.writes { reads == 0 } else { writes == 0 },
            Reads(_) => reads == 1 && all + over == 1,
            Writes(_) => writes == 1 && all + over == 1,
            Lost => all <= usize::from(attempt.has_late_requests),
        };
        must!(
            right,
            "{} believes {:?}; the server has {reads} read holds, {writes} write holds, {over} expired, {queued} queued",
            attempt.name,
            state.views[one]
        );
        must!(
            !server_state.seen[one] || queued == 1,
            "a mark of {} is left, but it does not wait",
            attempt.name
        );
        must!(
            state.views[one] != Ended || server_state.ended[one].is_some(),
            "the end of {} is not remembered",
            attempt.name
        );
    }
    Ok(())
}

/// Checks that a new writer has a larger token than all before, and that no other step makes one.
/// Returns the token of the last writer.
fn tokens(scenario: &Scenario, before: &State, step: Move, after: &ServerState) -> Result<i64, String> {
    if scenario.fencing == Fencing::Off {
        return Ok(0);
    }
    let (last, token) = (before.server_state.counter.unwrap_or(0), after.counter.unwrap_or(0));
    let mut written = before.written;
    must!(token >= last, "the last token was {last}, and is {token}");
    if let Some(write) = after.writes() {
        must!(
            after.token == Some(token),
            "{:?} writes with the token {:?}, not {token}",
            write.owner,
            after.token
        );
        let same = before.server_state.writes().is_some_and(|hold| is_same(hold, write));
        must!(same || token > last, "a new writer has the old token {token}");
        let raised = scenario.fencing == Fencing::Proposed || token == last;
        must!(!same || raised, "the same writer has a new token {token}");
        written = token;
    }
    must!(after.token.is_none_or(|token| token >= written), "the token {:?} follows {written}", after.token);
    must!(token == last || !matches!(step, Move::Downgrade(_)), "a downgrade makes the token {token}");
    Ok(written)
}

/// Whether one hold continues the other.
fn is_same(before: &Hold, after: &Hold) -> bool {
    before.owner == after.owner && before.attempts.iter().any(|one| after.attempts.contains(one))
}

/// Checks fairness: a waiting writer keeps new readers out; after a writer, all waiting readers are
/// admitted; and a release admits a waiter.
fn fair(scenario: &Scenario, before: &State, step: Move, after: &State) -> Result<(), String> {
    let (was, is) = (&before.server_state, &after.server_state);
    let waiting = is.waiters(scenario, true);
    let gated = was.writer_wait_until == Some(true)
        && was.waiters(scenario, true).iter().any(|one| waiting.contains(one));
    let writer = was.waiters(scenario, true).into_iter().filter_map(|one| was.queued(one)).min();
    let writer = writer.unwrap_or(i64::MAX);
    for (owner, name) in scenario.owners.iter().enumerate() {
        let Some(hold) = is.reads(owner) else { continue };
        let left = is.writer_left != was.writer_left;
        if !gated || was.writes().is_some() || was.reads(owner).is_some() || left {
            continue;
        }
        let first = |one: &usize| {
            let place = was.queued(*one).or(before.noted[*one].filter(|_| step == Move::Ask(*one)));
            place.is_some_and(|place| place < writer || was.writer_left.is_some_and(|left| place <= left))
        };
        must!(hold.attempts.iter().all(first), "{name} reads past a waiting writer");
    }
    let left = was.writes().is_some_and(|hold| !is.writes().is_some_and(|now| is_same(hold, now)));
    if left {
        for one in was.waiters(scenario, false) {
            let attempt = &scenario.attempts[one];
            let there = !attempt.is_unsubscribed && step != Move::Leave(one);
            let reads = is.reads(attempt.owner).is_some_and(|hold| hold.attempts.contains(&one));
            must!(!there || reads, "a writer's hold has ended, but {} still waits to read", attempt.name);
        }
    }
    let ends = matches!(step, Move::Release(_) | Move::Leave(_) | Move::ForceReaders | Move::ForceWriter);
    if ends && !was.is_free() && is.is_free() && is.reads.iter().all(Option::is_none) {
        must!(is.queue.is_empty(), "the lock became free, but no waiter was admitted");
    }
    if ends && waiting.is_empty() && is.writes().is_none() && is.writer_wait_until != Some(true) {
        must!(is.waiters(scenario, false).is_empty(), "readers wait, but no writer keeps them out");
    }
    Ok(())
}

/// Checks that a waiter that has not polled within its claim is never granted the lock, and leaves
/// the queue when another one polls.
fn dead(scenario: &Scenario, before: &State, step: Move, after: &ServerState) -> Result<(), String> {
    let was = &before.server_state;
    let polls = match step {
        Move::Ask(one) | Move::LostReply(one) => was.is_alive(one) && after.queued(one).is_some(),
        _ => false,
    };
    for (one, _) in &was.queue {
        let own = matches!(step, Move::Try(asks) | Move::Ask(asks) | Move::LostReply(asks) if asks == *one);
        if own || was.is_alive(*one) {
            continue;
        }
        let name = scenario.attempts[*one].name;
        must!(
            was.holds(scenario, *one) || !after.holds(scenario, *one),
            "{name} is dead, but is granted the lock"
        );
        must!(!polls || after.queued(*one).is_none(), "{name} is dead, but keeps its place");
    }
    Ok(())
}
