//! The script that is searched, and the commands that write a lock's state to a server and read it.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use redis::{Cmd, Pipeline};

use super::clients::{KEYS, Scenario};
use super::lock_state::{LANE, Mode, PASSED, ServerState, UPGRADES};
use crate::support::raw::{Verb, script};

/// Entries of the queue's key that belong to no attempt of the scenario: a waiter of another kind,
/// the mark that keeps it alive, and the mark of an attempt that was ended.
pub const OTHERS: [&str; 3] = ["o mutex 60000  ", "seen o", "ended x"];

/// `lua/rwlock.lua`, after a change of its text.
#[derive(Debug)]
pub struct Script {
    sum: String,
    verbs: BTreeMap<&'static str, Verb>,
}

impl Script {
    /// One request in sixteen removes dead waiters, by the clock; here all do, so that a request
    /// has one outcome.
    pub async fn load(server: &crate::support::Server, change: impl Fn(String) -> String) -> Script {
        let mut text = change(script("rwlock"));
        for condition in CLEANS {
            assert!(text.contains(condition), "lua/rwlock.lua has no {condition:?}");
            text = text.replace(condition, "true");
        }
        let verbs = ["read", "write", "renew", "release", "downgrade"];
        let verbs = verbs.map(|name| (name, Verb::new("rwlock", name))).into();
        Script { sum: server.run(&["SCRIPT", "LOAD", &text]).await, verbs }
    }

    pub fn request(&self, verb: &str, words: &[(&'static str, &str)]) -> Cmd {
        let words: Vec<_> = words.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.sum).arg(KEYS.len()).arg(&KEYS).arg(self.verbs[verb].arguments(&words));
        cmd
    }
}

/// The conditions for the removal of dead waiters in a call, and from the queue of one lock.
const CLEANS: [&str; 2] = ["(-time) % 16 < n", "(time + i) % 16 == 1"];

/// The time of this process's clock, which is the server's clock as well, in microseconds.
pub fn instant() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64
}

/// Adds the commands that write a state. The keys last for less than a claim, so a grant has to
/// extend them.
pub fn place(pipe: &mut Pipeline, scenario: &Scenario, server_state: &ServerState, instant: i64) {
    let lasts_until = instant / 1000 + 50_000;
    let ends = |live| if live { lasts_until } else { 1 };
    let mut hash: Vec<(String, String)> = Vec::new();
    let mut field = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            hash.push((name.to_owned(), value));
        }
    };
    let words = |attempts: &[usize]| {
        attempts.iter().map(|one| format!(" {}", scenario.attempts[*one].name)).collect::<String>()
    };
    let sole = server_state.mode == Mode::Sole;
    let write = server_state.write.as_ref().map(|hold| ("write", hold));
    for (side, hold) in
        write.into_iter().chain(server_state.reads.iter().flatten().map(|hold| ("read", hold)))
    {
        let (ends, owner, words) = (ends(hold.is_live), scenario.owners[hold.owner], words(&hold.attempts));
        match side {
            _ if sole => field("mode", Some(format!("sole {side} {owner}{words}"))),
            "write" => field("write", Some(format!("{ends} {owner}{words}"))),
            _ => field(&format!("read:{owner}"), Some(format!("{ends}{words}"))),
        }
    }
    field("mode", (server_state.mode == Mode::Several).then(|| "several".to_owned()));
    // A sole reader has the counter's token.
    field(
        "token",
        server_state.token.filter(|_| !sole || server_state.write.is_some()).map(|token| token.to_string()),
    );
    field("readers", server_state.readers.map(|count| count.to_string()));
    field("writer_wait_until", server_state.writer_wait_until.map(|live| ends(live).to_string()));
    field(
        "upgrade",
        server_state.upgrade.map(|(live, owner)| format!("{} {}", ends(live), scenario.owners[owner])),
    );
    field("writer_left", server_state.writer_left.map(|time| (instant + time).to_string()));

    let mut queue: Vec<(i64, String)> = Vec::new();
    for (one, place) in &server_state.queue {
        let lane = if scenario.attempts[*one].writes { 0 } else { -LANE };
        let score = if *place == UPGRADES { 0 } else { instant + place + lane };
        queue.push((score, scenario.waiter(*one)));
    }
    for (one, attempt) in scenario.attempts.iter().enumerate() {
        let queued = server_state.queued(one).is_some();
        // An expired mark has no effect.
        let seen = if server_state.seen[one] { instant + 121_000_000 } else { instant + 60_000_000 };
        if server_state.seen[one] || queued && !server_state.is_alive(one) {
            queue.push((LANE + seen, format!("seen {}", attempt.name)));
        }
        if let Some(answer) = server_state.ended[one] {
            let until = (instant / 1_000_000 + 60) * 1_000_000;
            queue.push((LANE + until + answer + 10, format!("ended {}", attempt.name)));
        }
    }
    if scenario.others {
        let until = (instant / 1_000_000 + 60) * 1_000_000 + 10;
        queue.extend([
            (instant - 2 * PASSED, OTHERS[0].to_owned()),
            (LANE + until + 61_000_000, OTHERS[1].to_owned()),
            (LANE + until, OTHERS[2].to_owned()),
        ]);
    }

    pipe.del(&KEYS).ignore();
    if !hash.is_empty() {
        pipe.hset_multiple(KEYS[0], &hash).ignore().pexpire_at(KEYS[0], lasts_until).ignore();
    }
    if !queue.is_empty() {
        pipe.zadd_multiple(KEYS[1], &queue).ignore().pexpire(KEYS[1], 60_000).ignore();
    }
    if let Some(counter) = server_state.counter {
        pipe.pset_ex(KEYS[2], counter, 3_600_000).ignore();
    }
}

/// The replies to the commands of [`look`]: hash, queue with scores, counter, the three TTLs, and
/// the server's time.
pub type Look = (Vec<(String, String)>, Vec<(String, f64)>, Option<i64>, i64, i64, i64, (i64, i64));

/// The number of those commands.
pub const LOOKS: usize = 7;

/// Adds the commands that read the state.
pub fn look(pipe: &mut Pipeline) {
    pipe.hgetall(KEYS[0]).zrange_withscores(KEYS[1], 0, -1).get(KEYS[2]);
    for key in KEYS {
        pipe.pttl(key);
    }
    pipe.cmd("TIME");
}
