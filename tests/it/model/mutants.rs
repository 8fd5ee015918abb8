//! Ways to break the scripts.

/// A change of the text, in the scripts named: one word, or several.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    scripts: &'static str,
    from: &'static str,
    to: &'static str,
}

const LET_IN: &str = "read_acquire write_acquire release downgrade read_force write_force";

const fn mutant(name: &'static str, scripts: &'static str, from: &'static str, to: &'static str) -> Mutant {
    Mutant { name, scripts, from, to }
}

pub const ALL: &[Mutant] = &[
    mutant(
        "a writer does not look at the readers",
        "write_acquire",
        "other_ends = others_read() and other_reader()",
        "other_ends = nil",
    ),
    mutant(
        "a reader does not look at the writer",
        "read_acquire",
        "elseif writes and writes ~= owner then",
        "elseif false then",
    ),
    mutant(
        "a release does not look for its attempt",
        "release",
        "string.match(read, '^%d+ (%S+)$') == attempt",
        "string.match(read, '^%d+ (%S+)$')",
    ),
    mutant(
        "a second delivery counts again",
        "read_acquire write_acquire",
        "if not has(attempts, attempt) then",
        "if true then",
    ),
    mutant(
        "a renewal revives what was over",
        "renew",
        "if ends and tonumber(ends) > now then",
        "if ends then",
    ),
    mutant(
        "a downgrade leaves a gap",
        "downgrade",
        "redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. holds)",
        "",
    ),
    mutant(
        "an upgrade does not look at the other readers",
        LET_IN,
        "local alone = readers == 1 and its_owner and",
        "local alone = its_owner and",
    ),
    mutant("a release lets nobody in", "release", "once(answer)\nlet_in()\n", "once(answer)\n"),
    mutant(
        "a dead reader counts for ever",
        "write_acquire",
        "if not ends then\n          over[#over + 1] = field",
        "if not ends then\n          latest = now + 1",
    ),
    mutant(
        "the end of a reader is that of the key",
        "write_acquire",
        "if ends and tonumber(ends) > now then",
        "if ends then",
    ),
    mutant(
        "one reader's release is that of all",
        "release",
        "redis.call('HSET', KEYS[1], 'readers', readers - 1)",
        "redis.call('DEL', KEYS[1])",
    ),
    mutant(
        "what was ended is not refused",
        "read_acquire write_acquire",
        "if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end",
        "",
    ),
    mutant("an end is not remembered", "release", "if ended_ms > 0 then", "if false then"),
    mutant(
        "a reader does not look at the gate",
        "read_acquire",
        "if not writes and gate > now then",
        "if false then",
    ),
    mutant(
        "the gate never lapses",
        "write_acquire",
        "math.max(now + claim_ms, tonumber(state[5]) or 0)",
        "now + 86400000",
    ),
    mutant(
        "the readers who waited do not go first",
        "release",
        "if waited and admit_readers(waited) then",
        "if false then",
    ),
    mutant("two upgrades wait for each other", "write_acquire", "return -6\n", "upgrades = true\n"),
    mutant(
        "a writer goes on under the old token",
        "write_acquire",
        "local token = tonumber(known or floor ~= '' and next_token() or 0)",
        "local token = tonumber(known or redis.call('GET', KEYS[2]) or 1)",
    ),
    mutant(
        "who was granted stays in the queue",
        "write_acquire",
        "if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end",
        "",
    ),
    mutant(
        "the key ends before what was granted last",
        LET_IN,
        "if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end",
        "",
    ),
];

impl Mutant {
    /// The script, broken if it is one of those.
    pub fn apply(&self, script: &str, text: String) -> String {
        if !self.scripts.split(' ').any(|name| name == script) {
            return text;
        }
        assert!(text.contains(self.from), "{}: {script} has no {:?}", self.name, self.from);
        text.replace(self.from, self.to)
    }
}
