//! The script that is searched, and those that write a lock's state to a server and read it back.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use redis::Cmd;

use super::clients::{KEYS, Scenario};
use super::lock_state::{LANE, Mode, PASSED, ServerState, UPGRADES};
use crate::support::raw::{Verb, script};

/// Writes a state. The keys last for less than a claim, so a grant has to extend them.
const PLACE: &str = r"
local clock = redis.call('TIME')
local live = clock[1] * 1000 + math.floor(clock[2] / 1000) + 50000
redis.call('DEL', unpack(KEYS))
local at = 1
local function some()
  local from = at + 1
  at = from + ARGV[at]
  return from, at - 1
end
local from, to = some()
for i = from + 1, to, 2 do
  local first = string.byte(ARGV[i])
  if first == 76 then ARGV[i] = live .. string.sub(ARGV[i], 2) end
  if first == 79 then ARGV[i] = '1' .. string.sub(ARGV[i], 2) end
end
if from <= to then
  redis.call('HSET', KEYS[1], unpack(ARGV, from, to))
  redis.call('PEXPIREAT', KEYS[1], live)
end
from, to = some()
if from <= to then
  redis.call('ZADD', KEYS[2], unpack(ARGV, from, to))
  redis.call('PEXPIRE', KEYS[2], 60000)
end
from, to = some()
if from <= to then redis.call('SET', KEYS[3], ARGV[from], 'PX', 3600000) end
";

/// Reads the state. The first line is a rule that the state breaks, or empty.
const LOOK: &str = r"
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)
local seen, latest = {''}, 0
local hash = redis.call('HGETALL', KEYS[1])
local mode = redis.call('HGET', KEYS[1], 'mode')
if hash[1] and not mode then seen[1] = 'the hash has no mode' end
for i = 1, #hash, 2 do
  local field, value = hash[i], hash[i + 1]
  local holds = field == 'write' or string.sub(field, 1, 5) == 'read:'
  if holds or field == 'writer_wait_until' or field == 'upgrade' then
    local ends, words = string.match(value, '^(%d+)(.*)$')
    ends = tonumber(ends)
    local long = ends > now + 100000
    if holds then
      latest = math.max(latest, ends)
    elseif long then
      seen[1] = field .. ' lasts longer than a claim'
    end
    value = (ends <= now and 'over' or long and 'long' or 'live') .. words
  elseif field == 'mode' and value ~= 'several' then
    local is_alone = #hash == 2 or #hash == 4 and redis.call('HEXISTS', KEYS[1], 'token') == 1
    if not is_alone then seen[1] = 'a sole hold has other fields beside it' end
    field, value = string.match(value, '^(sole) ([^ ]+ [^ ]+ [^ ]+)$')
    if not field then return 'an unknown mode' end
    value = (redis.call('PTTL', KEYS[1]) > 100000 and 'long ' or 'live ') .. value
  end
  seen[#seen + 1] = field .. ' ' .. value
end
local queue = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #queue, 2 do
  local entry, score = queue[i], tonumber(queue[i + 1])
  if score < 2^52 then
    seen[#seen + 1] = string.format('queued %.0f %s', score, entry)
  elseif score > 2^52 + time + (string.sub(entry, 1, 5) == 'seen ' and 61000000 or 0) then
    seen[#seen + 1] = string.format('%s %.0f', entry, (score - 2^52) % 1000000 - 10)
  end
end
local counter = redis.call('GET', KEYS[3])
if counter then seen[#seen + 1] = 'counter ' .. counter end
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) == -1 then seen[1] = key .. ' has no ttl' end
end
if hash[1] then
  local pttl = redis.call('PTTL', KEYS[1])
  clock = redis.call('TIME')
  now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  if pttl + now + 2 < latest then seen[1] = 'the key ends before a hold' end
end
return table.concat(seen, '\n')
";

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

/// The SHA1 sums of both scripts.
#[derive(Clone, Debug)]
pub struct Tools {
    place: String,
    look: String,
}

/// The time of this process's clock, which is the server's clock as well, in microseconds.
pub fn instant() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64
}

impl Tools {
    pub async fn load(server: &crate::support::Server) -> Tools {
        let place = server.run(&["SCRIPT", "LOAD", PLACE]).await;
        let look = server.run(&["SCRIPT", "LOAD", LOOK]).await;
        Tools { place, look }
    }

    pub fn look(&self) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.look).arg(KEYS.len()).arg(&KEYS);
        cmd
    }

    pub fn place(&self, scenario: &Scenario, server_state: &ServerState, instant: i64) -> Cmd {
        let end = |live| if live { 'L' } else { 'O' };
        let mut hash: Vec<String> = Vec::new();
        let mut field = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                hash.extend([name.to_owned(), value]);
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
            let (end, owner, words) = (end(hold.is_live), scenario.owners[hold.owner], words(&hold.attempts));
            match side {
                _ if sole => field("mode", Some(format!("sole {side} {owner}{words}"))),
                "write" => field("write", Some(format!("{end} {owner}{words}"))),
                _ => field(&format!("read:{owner}"), Some(format!("{end}{words}"))),
            }
        }
        field("mode", (server_state.mode == Mode::Several).then(|| "several".to_owned()));
        // A sole reader has the counter's token.
        field(
            "token",
            server_state
                .token
                .filter(|_| !sole || server_state.write.is_some())
                .map(|token| token.to_string()),
        );
        field("readers", server_state.readers.map(|count| count.to_string()));
        field("writer_wait_until", server_state.writer_wait_until.map(|live| end(live).to_string()));
        field(
            "upgrade",
            server_state.upgrade.map(|(live, owner)| format!("{} {}", end(live), scenario.owners[owner])),
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

        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.place).arg(KEYS.len()).arg(&KEYS);
        cmd.arg(hash.len()).arg(&hash).arg(2 * queue.len());
        for (score, entry) in &queue {
            cmd.arg(score).arg(entry);
        }
        cmd.arg(usize::from(server_state.counter.is_some())).arg(server_state.counter);
        cmd
    }
}
