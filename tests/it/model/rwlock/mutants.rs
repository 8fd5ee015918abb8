//! Mutants: ways to break the scripts.

/// A change of the text of the script.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn mutant(name: &'static str, from: &'static str, to: &'static str) -> Mutant {
    Mutant { name, from, to }
}

pub const ALL: &[Mutant] = &[
    mutant(
        "a writer ignores the readers",
        "return lock.readers > (unexpired(lock.read, now) and 1 or 0)",
        "return false",
    ),
    mutant(
        "a release does not check its attempt",
        "words == attempt and readers > 0\n",
        "words and readers > 0\n",
    ),
    mutant(
        "a second delivery counts again",
        "if not is_held then attempts = attempts .. ' ' .. lock.attempt end\n    elseif",
        "attempts = attempts .. ' ' .. lock.attempt\n    elseif",
    ),
    mutant(
        "a second delivery to a writer counts again",
        "if not is_held then attempts = attempts .. ' ' .. lock.attempt end\n    local ends",
        "attempts = attempts .. ' ' .. lock.attempt\n    local ends",
    ),
    mutant(
        "a renewal revives an expired hold",
        "ends, words = 'read:' .. lock.owner, unexpired(lock.read, call.now)",
        "ends, words = 'read:' .. lock.owner, 0, string.match(lock.read or '', '^%d+ (.+)$')",
    ),
    mutant(
        "a downgrade leaves a gap",
        "  redis.call('HSET', lock.key, 'read:' .. lock.owner, hold,\n    'readers', lock.readers + (lock.read and 0 or 1))\n",
        "",
    ),
    mutant(
        "an upgrade ignores the other readers",
        "local is_alone = lock.readers == 1 and upgrader\n",
        "local is_alone = upgrader\n",
    ),
    mutant(
        "a release admits no waiters",
        "  pcall(admit_waiters, lock, call)\n  pcall(delete_if_free, lock)\n",
        "  pcall(delete_if_free, lock)\n",
    ),
    mutant(
        "a dead reader counts for ever",
        "if not ends then\n        expired[#expired + 1] = sample[i]",
        "if not ends then\n        latest = call.now + 1",
    ),
    mutant("a hold expires with the key", "if ends and ends + 0 > now then return", "if ends then return"),
    mutant(
        "one reader's release releases all",
        "try('HSET', lock, 'readers', readers - 1) -- if",
        "try('DEL', lock) -- if",
    ),
    mutant(
        "an ended attempt is not refused",
        "> 2^52 + call.time then return -1 end",
        "> 2^52 + call.time then end",
    ),
    mutant(
        "an end is not remembered",
        "  if not call.remembers then return end\n",
        "  if call then return end\n",
    ),
    mutant(
        "a reader ignores waiting writers",
        "elseif not writer and lock.wait_until > now and must_wait(lock, call) then",
        "elseif false then",
    ),
    mutant(
        "a waiting writer keeps readers out for ever",
        "math.max(ends, lock.wait_until), unpack(upgrade)",
        "call.now + 86400000, unpack(upgrade)",
    ),
    mutant(
        "waiting readers do not go first",
        "if waited and admit_readers(lock, waited, call) then\n",
        "if false then\n",
    ),
    mutant("two upgrades wait for each other", "then return -6 end\n", "then upgrade_ends = nil end\n"),
    mutant(
        "a writer continues under the old token",
        "    if token then return token end\n    if call.verb == 'read' then return shared_token(lock, call) end\n",
        "    if token then return token end\n    if call then return tonumber(redis.call('GET', lock.fence) or 1) end\n",
    ),
    mutant(
        "a granted attempt stays in the queue",
        "    leave_queue(lock, 'write', call)\n    local hold",
        "    local hold",
    ),
    mutant(
        "the key expires before the last grant",
        "  if lock.pttl < ends - call.now then\n    local kept",
        "  if lock.pttl < 0 then\n    local kept",
    ),
    mutant(
        "a dead writer is granted the lock",
        "if not attempt or not is_alive(lock.queue, attempt, place, claim_ms, call.time) then",
        "if not attempt then",
    ),
    mutant(
        "a dead reader is granted the lock",
        "if kind == 'read' and is_alive(lock.queue, attempt, place, claim_ms, call.time) then",
        "if kind == 'read' then",
    ),
    mutant(
        "a poll is not noted",
        "    redis.call('ZADD', lock.queue, string.format('%.0f', seen_until), 'seen ' .. lock.attempt)\n",
        "",
    ),
    mutant(
        "a mark counts for ever",
        "'seen ' .. attempt)) or 0) > 2^52 + 61000000 + time",
        "'seen ' .. attempt)) or 0) > 0",
    ),
    mutant(
        "a poll leaves dead waiters in the queue",
        "if place < 2^52 and not (waiter and is_alive(queue, waiter, place, claim_ms, call.time)) then",
        "if false then",
    ),
    mutant(
        "a waiter of another kind loses its place",
        "      others = others + 1\n",
        "      redis.call('ZREM', lock.queue, first[1])\n",
    ),
    mutant(
        "a free lock leaves a key",
        "  pcall(admit_waiters, lock, call)\n  pcall(delete_if_free, lock)\n",
        "  pcall(admit_waiters, lock, call)\n",
    ),
    mutant(
        "the mode stays sole beside a second hold",
        "redis.call('HSET', lock.key, 'mode', 'several', unpack(fields))",
        "redis.call('HSET', lock.key, unpack(fields))",
    ),
];

impl Mutant {
    /// The changed text of the script.
    pub fn apply(&self, text: String) -> String {
        assert!(text.contains(self.from), "{}: lua/rwlock.lua has no {:?}", self.name, self.from);
        text.replace(self.from, self.to)
    }
}
