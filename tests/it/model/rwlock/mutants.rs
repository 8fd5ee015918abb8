//! Mutants: ways to break the scripts.

/// A change of the text of one or several scripts.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    scripts: &'static str,
    from: &'static str,
    to: &'static str,
}

const ADMIT_WAITERS: &str = "read_acquire write_acquire release downgrade read_force write_force";

const fn mutant(name: &'static str, scripts: &'static str, from: &'static str, to: &'static str) -> Mutant {
    Mutant { name, scripts, from, to }
}

pub const ALL: &[Mutant] = &[
    mutant(
        "a writer ignores the readers",
        "write_acquire",
        "other_ends = others_read() and other_reader()",
        "other_ends = nil",
    ),
    mutant(
        "a reader ignores the writer",
        "read_acquire",
        "elseif writer and writer ~= owner then",
        "elseif false then",
    ),
    mutant(
        "a release does not check its attempt",
        "release",
        "if reader == attempt and readers > 1",
        "if readers > 1",
    ),
    mutant(
        "a second delivery counts again",
        "read_acquire",
        "if not has(attempts, attempt) then",
        "if true then",
    ),
    mutant(
        "a second delivery to a writer counts again",
        "write_acquire",
        "local is_held = has(attempts, attempt)",
        "local is_held = false",
    ),
    mutant(
        "a renewal revives an expired hold",
        "renew",
        "if ends and tonumber(ends) > now then",
        "if ends then",
    ),
    mutant(
        "a downgrade leaves a gap",
        "downgrade",
        "redis.call('HSET', KEYS[1], 'read:' .. owner, math.max(ends, read_ends or 0) .. ' ' .. reads)",
        "",
    ),
    mutant(
        "an upgrade ignores the other readers",
        ADMIT_WAITERS,
        "local is_alone = readers == 1 and waiter_owner and",
        "local is_alone = waiter_owner and",
    ),
    mutant("a release admits no waiters", "release", "answer(number)\nadmit_waiters()\n", "answer(number)\n"),
    mutant(
        "a dead reader counts for ever",
        "write_acquire",
        "if not ends then\n        expired[#expired + 1] = sample[i]",
        "if not ends then\n        latest = now + 1",
    ),
    mutant(
        "a reader expires with the key",
        "write_acquire",
        "if ends and tonumber(ends) > now then",
        "if ends then",
    ),
    mutant(
        "one reader's release releases all",
        "release",
        "redis.call('HSET', KEYS[1], 'readers', readers - 1)",
        "redis.call('DEL', KEYS[1])",
    ),
    mutant(
        "an ended attempt is not refused",
        "read_acquire write_acquire",
        "> 2^52 + time then return -1 end",
        "> 2^52 + time then end",
    ),
    mutant(
        "an end is not remembered",
        "release",
        "  if remember then\n    redis.call('ZREM'",
        "  if false then\n    redis.call('ZREM'",
    ),
    mutant(
        "a reader ignores waiting writers",
        "read_acquire",
        "if not writer and state.wait_until > now then",
        "if false then",
    ),
    mutant(
        "a waiting writer keeps readers out for ever",
        "write_acquire",
        "math.max(now + claim, state.wait_until)",
        "now + 86400000",
    ),
    mutant(
        "waiting readers do not go first",
        "release",
        "if waited and admit_readers(waited) then",
        "if false then",
    ),
    mutant("two upgrades wait for each other", "write_acquire", "return -6\n", "upgrades = true\n"),
    mutant(
        "a writer continues under the old token",
        "write_acquire",
        "  if new_token then return new_token end\n  return next_token()",
        "  return tonumber(redis.call('GET', KEYS[2]) or 1)",
    ),
    mutant("a granted attempt stays in the queue", "write_acquire", "\nleave_queue(waiter)\n", "\n"),
    mutant(
        "the key expires before the last grant",
        ADMIT_WAITERS,
        "if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end",
        "",
    ),
    mutant(
        "a dead writer is granted the lock",
        ADMIT_WAITERS,
        "if waiter_attempt and is_alive(waiter_attempt, tonumber(first[2]), ms) then",
        "if waiter_attempt then",
    ),
    mutant(
        "a dead reader is granted the lock",
        ADMIT_WAITERS,
        "and waiter_kind == 'read' and is_alive(waiter_attempt, tonumber(waiting[i + 1]), ms) then",
        "and waiter_kind == 'read' then",
    ),
    mutant(
        "a poll is not noted",
        "write_acquire",
        "redis.call('ZADD', KEYS[3], mark, 'seen ' .. attempt)",
        "",
    ),
    mutant(
        "a mark counts for ever",
        "read_acquire write_acquire release",
        "'seen ' .. waiter_attempt)) or 0) > 2^52 + 61000000 + time",
        "'seen ' .. waiter_attempt)) or 0) > 0",
    ),
    mutant(
        "a poll leaves dead waiters in the queue",
        "read_acquire write_acquire",
        "if not (waiter_attempt and is_alive(waiter_attempt, score, ms)) then",
        "if false then",
    ),
    mutant(
        "a waiter of another kind loses its place",
        ADMIT_WAITERS,
        "      others = others + 1\n    else\n      redis.call('ZREM', KEYS[3], first[1]",
        "      redis.call('ZREM', KEYS[3], first[1])\n    else\n      redis.call('ZREM', KEYS[3], first[1]",
    ),
    mutant("a free lock leaves a key", "release", "admit_waiters()\ndelete_if_free()\n", "admit_waiters()\n"),
    mutant(
        "the mode stays sole beside a second hold",
        "write_acquire",
        "redis.call('HSET', KEYS[1], 'mode', 'several', 'read:' .. holder_owner",
        "redis.call('HSET', KEYS[1], 'read:' .. holder_owner",
    ),
];

impl Mutant {
    /// The text of a script, changed if the mutant names it.
    pub fn apply(&self, script: &str, text: String) -> String {
        if !self.scripts.split(' ').any(|name| name == script) {
            return text;
        }
        assert!(text.contains(self.from), "{}: {script} has no {:?}", self.name, self.from);
        text.replace(self.from, self.to)
    }
}
