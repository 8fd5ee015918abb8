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
        "return lock.readers > (unexpired(lock.read) and 1 or 0)",
        "return false",
    ),
    mutant(
        "a reader ignores the writer",
        "if writer and writer ~= lock.owner then return queue_to_read",
        "if false then return queue_to_read",
    ),
    mutant("a release does not check its attempt", "if reader == attempt and readers > 1", "if readers > 1"),
    mutant(
        "a second delivery counts again",
        "lock.is_held = has(attempts, lock.attempt)\n    if not lock.is_held then",
        "if true then",
    ),
    mutant(
        "a second delivery to a writer counts again",
        "lock.is_held = has(attempts, lock.attempt)\n  if",
        "lock.is_held = false\n  if",
    ),
    mutant(
        "a renewal revives an expired hold",
        "ends, words = 'read:' .. lock.owner, unexpired(lock.read)",
        "ends, words = 'read:' .. lock.owner, 0, string.match(lock.read or '', '^%d+ (.+)$')",
    ),
    mutant(
        "a downgrade leaves a gap",
        "redis.call('HSET', lock.key, 'read:' .. lock.owner, math.max(ends, read_ends or 0) .. ' ' .. reads,\n    'readers', lock.readers + (lock.read and 0 or 1))",
        "",
    ),
    mutant(
        "an upgrade ignores the other readers",
        "local is_alone = lock.readers == 1 and upgrader and",
        "local is_alone = upgrader and",
    ),
    mutant(
        "a release admits no waiters",
        "record_answer(lock, number)\n  admit_waiters(lock)\n",
        "record_answer(lock, number)\n",
    ),
    mutant(
        "a dead reader counts for ever",
        "if not ends then\n        expired[#expired + 1] = sample[i]",
        "if not ends then\n        latest = now + 1",
    ),
    mutant(
        "a hold expires with the key",
        "if ends and tonumber(ends) > now then return",
        "if ends then return",
    ),
    mutant(
        "one reader's release releases all",
        "redis.call('HSET', lock, 'readers', readers - 1)\n            answers",
        "redis.call('DEL', lock)\n            answers",
    ),
    mutant("an ended attempt is not refused", "> MARKS + time then return -1 end", "> MARKS + time then end"),
    mutant(
        "an end is not remembered",
        "  if remember then\n    local mark",
        "  if false then\n    local mark",
    ),
    mutant(
        "a reader ignores waiting writers",
        "if not writer and must_wait_for_writer(lock) then",
        "if false then",
    ),
    mutant(
        "a waiting writer keeps readers out for ever",
        "'writer_wait_until', math.max(now + claim, lock.wait_until)",
        "'writer_wait_until', now + 86400000",
    ),
    mutant(
        "waiting readers do not go first",
        "if waited and admit_readers(lock, waited) then\n",
        "if false then\n",
    ),
    mutant("two upgrades wait for each other", "return -6\n", "upgrades = true\n"),
    mutant(
        "a writer continues under the old token",
        "if (current or 0) > 0 then return current end\n  return next_tokens(lock.fence, minimum, tokens)",
        "return tonumber(redis.call('GET', lock.fence) or 1)",
    ),
    mutant(
        "a granted attempt stays in the queue",
        "leave_queue(lock, 'write')\n  redis.call('HSET', lock.key, 'write', now + ttl_ms",
        "redis.call('HSET', lock.key, 'write', now + ttl_ms",
    ),
    mutant(
        "the key expires before the last grant",
        "if lock.pttl < ends - now then\n    local kept",
        "if lock.pttl < 0 then\n    local kept",
    ),
    mutant(
        "a dead writer is granted the lock",
        "if not waiter or not is_alive(lock.queue, waiter, place) then",
        "if not waiter then",
    ),
    mutant(
        "a dead reader is granted the lock",
        "and waiter.kind == 'read' and is_alive(lock.queue, waiter, tonumber(entries[i + 1])) then",
        "and waiter.kind == 'read' then",
    ),
    mutant(
        "a poll is not noted",
        "if polls then redis.call('ZADD', lock.queue, mark, 'seen ' .. lock.attempt) end",
        "",
    ),
    mutant(
        "a mark counts for ever",
        "'seen ' .. waiter.attempt)) or 0) > MARKS + 61000000 + time",
        "'seen ' .. waiter.attempt)) or 0) > 0",
    ),
    mutant(
        "a poll leaves dead waiters in the queue",
        "if score < MARKS and not (waiter and is_alive(lock.queue, waiter, score)) then",
        "if false then",
    ),
    mutant(
        "a waiter of another kind loses its place",
        "      others = others + 1\n",
        "      redis.call('ZREM', lock.queue, first[1])\n",
    ),
    mutant(
        "a free lock leaves a key",
        "\n  admit_waiters(lock)\n  delete_if_free(lock)\n",
        "\n  admit_waiters(lock)\n",
    ),
    mutant(
        "the mode stays sole beside a second hold",
        "'mode', 'several', 'read:' .. owner",
        "'read:' .. owner",
    ),
];

impl Mutant {
    /// The changed text of the script.
    pub fn apply(&self, text: String) -> String {
        assert!(text.contains(self.from), "{}: lua/rwlock.lua has no {:?}", self.name, self.from);
        text.replace(self.from, self.to)
    }
}
