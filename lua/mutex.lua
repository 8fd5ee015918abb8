-- redlatch, wire version 1: the mutex. Licence: MIT OR Apache-2.0.
--
-- A lock that one attempt holds at a time, for a lease. Clients that find it in use may queue: a
-- release grants it to the next waiter, and notifies it. Each lock has three keys:
--
--   lock     lock:backup              string: the attempt that holds the lock; its TTL is the lease
--   waiters  {lock:backup}:waiters    sorted set of the waiters, and of marks, by score:
--              "attempt mutex claim_ms channel "   its place: the microsecond at which it queued
--              "seen attempt"    2^52 + 61000000 + the microsecond from which the waiter is dead
--              "ended attempt"   2^52 + the second until which it counts, in microseconds, + the
--                                answer + 10
--   fence    {lock:backup}:fence      string: the last fencing token, a number that grows
--
-- One call serves 1 to 128 locks, which need not belong together, in order:
--
--   EVALSHA sha1 numkeys  lock... waiters... fence... [node]
--     verb  <first word of each lock>... <second word of each lock>...  words shared by all locks
--
--   verb      words of each lock             shared words
--   acquire   attempt queued_at proposal     ttl_ms [min_token claim_ms channel grant_before
--                                            token_ttl_ms tokens all purpose run]
--   renew     attempt                        ttl_ms
--   release   attempt last_token             [min_token remember claim_ms channel token_ttl_ms
--                                            tokens force only_from]
--   inspect
--
-- An empty word is the default, and trailing shared words may be left out. The answer is a list
-- with one answer for each lock. An error of one lock is its answer, as a text; the only lock of a
-- call answers it as an error. The integer -5 instead of a list: the call as a whole is malformed.
--
--   attempt       up to 128 bytes, no space; new for every lease, the same in each request of it
--   queued_at     below 2^52: the waiter's place, the time of its first busy answer; default: now
--   proposal      quorum: the token to accept, 1 to a day ahead of the clock in microseconds
--   last_token    of the tokens that were reserved, the last one used: the counter goes back to it
--   ttl_ms        1 to 9999999999, counted from now
--   min_token     below 2^52: the token is larger than this; default: no token. In a release, the
--                 token of the next waiter is larger; default: 0
--   claim_ms      1 to 60000: queue if the lock is in use, and keep it so long for the waiter that
--                 it is granted to; default: do not queue. In a release: also leave the queue
--   channel       where to notify the waiter: ends in "wake:" and 32 hexadecimal digits, or those
--                 and "~"; default: the waiter polls
--   grant_before  refuse the attempts from this microsecond on; default: never
--   token_ttl_ms  1 to 9999999999: how long a new counter is kept; default: 3600000
--   tokens        1 to 1000: how many tokens to reserve; default: 1. In a release: as in acquire
--   all           1: all locks or none; not with claim_ms. Default: each for itself
--   purpose       quorum: repair: a lease that other nodes hold; nested; default: a new lease
--   run           with the key node: the run id of this server, which must have been admitted
--   remember      1: refuse the attempt from now on, and repeat this answer, for a minute
--   force         1: revoke the lock from any holder; attempt is new for the call; implies remember
--   only_from     with force, an attempt: only if it holds the lock
--
--   acquire  token          granted: the first of its tokens; 0: without a token. A second delivery
--                           gets the same, and grants nothing more
--            {pttl, time}   in use: ask again in pttl ms at most; the clock in microseconds
--            {-8, highest}  quorum: refused, this accepted token is not smaller than the proposal
--            -9             quorum: refused, the node was not admitted since it started
--   renew    time           held for ttl_ms from now
--            0              lost: expired, released, or another attempt's
--   release  1              released, or revoked: granted to the next waiter, or free
--            0              the attempt held nothing. A second delivery changes nothing
--   inspect  {1, token, waiters, time}, and if it is held: attempt, 1, pttl. token is a text
--            {-2, '0', 0, time}
--   any      -1             refused: the attempt was ended, or comes too late
--            -2             refused: the key holds something else; for renew: lost
--            -3             acquire, force: refused, the key has no TTL
--            -5             refused: a word is malformed
--            -10            not served, and nothing was changed: the call had too much to do, or
--                           with `all`, another lock was not granted

-- ------------------------------------------------------------------------------------------ checks
-- An empty word is the default. Every word is checked before the first write, but for the form of
-- an attempt that is the stored one, and for min_token in a release, which is never refused.

local verb, n, node = ARGV[1], #KEYS / 3, nil
if n % 1 > 0 then node, n = KEYS[#KEYS], (#KEYS - 1) / 3 end
local words = verb == 'acquire' and 3 or verb == 'release' and 2 or verb == 'renew' and 1 or 0
local further = #ARGV - (words == 2 and 2 or 3) - words * n -- how many follow min_token
if n < 1 or n > 128 or n % 1 > 0 or #ARGV < 1 + words * n then return -5 end

local ttl_ms, min_token, claim_ms, channel, grant_before, token_ttl_ms, tokens, all, purpose, run
local remember, force, only_from, minimum, clock
if verb == 'acquire' or verb == 'renew' then
  ttl_ms, min_token = ARGV[2 + words * n], ARGV[3 + words * n]
  if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
  if min_token and min_token ~= '' then
    minimum = string.find(min_token, '^%d+$') and min_token + 0
    if not minimum or minimum >= 2^52 then return -5 end
  end
elseif verb ~= 'release' and verb ~= 'inspect' then
  return -5
end
local claim, count = nil, 1
if further > 0 then
  if verb == 'acquire' then
    claim_ms, channel, grant_before, token_ttl_ms, tokens, all, purpose, run =
      unpack(ARGV, 4 + 3 * n)
  elseif verb == 'release' then
    remember, claim_ms, channel, token_ttl_ms, tokens, force, only_from = unpack(ARGV, 3 + 2 * n)
  end
  if claim_ms and claim_ms ~= '' then
    claim = #claim_ms <= 5 and string.find(claim_ms, '^[1-9]%d*$') and claim_ms + 0
    if not claim or claim > 60000 then return -5 end
  end
  if channel and channel ~= '' and (#channel > 256 or string.find(channel, ' ', 1, true)
    or not (#channel > 36 and string.find(channel, '^wake:%x+$', -37)
      or #channel > 37 and string.find(channel, '^wake:%x+~$', -38))) then
    return -5
  end
  if tokens and tokens ~= '' then
    count = #tokens <= 4 and string.find(tokens, '^[1-9]%d*$') and tokens + 0
    if not count or count > 1000 then return -5 end
  end
  if grant_before == '' then grant_before = nil end
  if token_ttl_ms == '' then token_ttl_ms = nil end
  if only_from == '' then only_from = nil end
  if grant_before and not string.find(grant_before, '^%d+$')
    or token_ttl_ms and (#token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$'))
    or not string.find((remember or '') .. ' ' .. (all or '') .. ' ' .. (force or ''), '^1? 1? 1?$')
    or purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair'
    or only_from and (#only_from > 256 or string.find(only_from, '^:'))
    or string.find(only_from or '', ' ', 1, true)
    or claim and all == '1' then
    return -5
  end
end

-- --------------------------------------------------------------------------------- the common case
-- No lock has a holder or a queue; a release or renewal finds its own attempt. A lock that takes
-- more than this is left to the next sections. This one makes no closure: ten take as long as a
-- command.

local answers, left = {nil}, nil
local raised -- counters that were raised for a lock that is left, which has to complete that
if verb == 'acquire' then
  local is_common = not (node or grant_before or purpose == 'repair' or all == '1')
  local are_free = is_common and redis.call('EXISTS', unpack(KEYS, 1, 2 * n)) == 0
  local seen = n > 1 and {}
  for i = 1, n do
    local lock, fence, attempt = KEYS[i], KEYS[2 * n + i], ARGV[1 + i]
    local proposal, is_free, token = ARGV[1 + 2 * n + i], are_free, nil
    if seen then -- the same lock again is not free any more
      if not are_free and is_common then
        is_free = redis.call('EXISTS', lock, KEYS[n + i]) == 0
      end
      is_free = is_free and not seen[lock]
      seen[lock] = true
    end
    if not is_free or ARGV[1 + n + i] ~= '' or attempt == '' or #attempt > 128
      or string.find(attempt, ' ', 1, true) then
      token = nil
    elseif proposal ~= '' then
      clock = clock or redis.pcall('TIME')
      local highest = redis.pcall('GET', fence) or '0'
      if clock[1] and string.find(proposal, '^[1-9]%d*$')
        and proposal + 0 <= (clock[1] + 86400) * 1000000
        and type(highest) == 'string' and string.find(highest, '^%d+$')
        and proposal + 0 > highest + 0 then
        token = proposal + 0
        local last = count == 1 and proposal or string.format('%.0f', token + count - 1)
        local set = redis.pcall('SET', fence, last, 'PX', token_ttl_ms or '3600000')
        if set.err then token = nil end
      end
    elseif minimum then
      local last = redis.pcall('INCRBY', fence, count == 1 and '1' or tokens)
      if type(last) == 'number' then
        if last > count and last - count >= minimum and last < 2^53 then
          token = last - count + 1
        else
          raised = raised or {}
          raised[i] = last
        end
      end
    else
      token = 0
    end
    if token and not redis.pcall('SET', lock, attempt, 'PX', ttl_ms).err then
      answers[i] = token
    else
      left = left or {}
      left[#left + 1] = i
    end
  end
elseif verb == 'release' then
  local is_plain = further < 1 and redis.call('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0
  for i = 1, n do
    if is_plain and ARGV[1 + n + i] == '' and redis.pcall('GET', KEYS[i]) == ARGV[1 + i] then
      answers[i] = redis.call('DEL', KEYS[i])
    else
      left = left or {}
      left[#left + 1] = i
    end
  end
elseif verb == 'renew' then
  clock = redis.call('TIME')
  local time = clock[1] * 1000000 + clock[2]
  for i = 1, n do
    if redis.pcall('GET', KEYS[i]) == ARGV[1 + i] then
      redis.call('PEXPIRE', KEYS[i], ttl_ms)
      answers[i] = time
    else
      left = left or {}
      left[#left + 1] = i
    end
  end
else
  left = {}
  for i = 1, n do left[i] = i end
end
if not left then return answers end

-- ---------------------------------------------------------------------------------- a lock in use
-- From here on, one lock is served after the other. A function uses only what it receives, and
-- other functions; `call` has what all locks of the call share. Where the lock is held by another
-- attempt, an acquire ends here.

-- An answer, or an error as a text, from its code on, which Redis 6.2 puts into another text.
local function to_answer(ok, answer)
  if ok and not (type(answer) == 'table' and answer.err) then return answer end
  answer = type(answer) == 'table' and answer.err or tostring(answer)
  return string.match(answer, '%u%u%u+ [^\r\n]*') or 'ERR ' .. answer
end

clock = clock or redis.pcall('TIME')
if clock.err then
  for i, last in pairs(raised or {}) do -- a counter is not left without a TTL
    local fence = KEYS[2 * n + i]
    if last == count then redis.call('DEL', fence) else redis.call('DECRBY', fence, count) end
  end
  if n == 1 then return {err = to_answer(false, clock)} end
  for _, i in ipairs(left) do answers[i] = to_answer(false, clock) end
  return answers
end
local time = clock[1] * 1000000 + clock[2]
if verb == 'release' then -- a mistake of a client must not keep a lock from being released
  minimum = string.find(ARGV[2 + 2 * n] or '', '^%d+$') and ARGV[2 + 2 * n] + 0
  if minimum and minimum > time + 86400000000 then minimum = nil end
end
local call = {
  time = time, -- the microsecond
  ttl_ms = ttl_ms, token_ttl_ms = token_ttl_ms or '3600000', purpose = purpose,
  has_token = minimum ~= nil, minimum = minimum or 0, count = count,
  claim = claim, work = 0, -- about how many commands were sent
  -- What follows the attempt in its entry of the queue. A number of tokens comes after two words
  -- that other kinds have.
  terms = claim
    and ' mutex ' .. claim_ms .. ' ' .. (channel or '') .. (count > 1 and '   ' .. tokens or ' '),
}

-- A reply that is not an error; nil if the key holds another type. Any other error, as a missing
-- right, ends the service of the lock.
local function unless_wrong_type(reply)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
end

-- Queues the attempt at its place; or if it is queued, notes that it was seen, which counts for one
-- claim. `scores` are those of its mark of an end, its entry, and its mark of having been seen.
local function enqueue(queue, attempt, waiter, place, scores, call)
  local is_queued = scores and scores[2]
  call.now = call.now or string.format('%.0f', call.time) -- a text takes less time than a number
  local is_added = not is_queued and redis.call('ZADD', queue, 'NX', place or call.now, waiter) == 1
  if not is_added or place then
    -- The score is above all marks of ends, so that the oldest of those are found first.
    local seen_until = 2^52 + 61000000 + call.time + call.claim * 1000
    redis.call('ZADD', queue, string.format('%.0f', seen_until), 'seen ' .. attempt)
    -- The queue is kept for a minute: for usual claims, one poll in ten seconds suffices for that.
    local last = is_queued and call.claim <= 30000 and tonumber(scores[3])
    if last and math.floor(last / 10^7) == math.floor(seen_until / 10^7) then return end
  end
  local kept = redis.pcall('PEXPIRE', queue, '60000')
  if type(kept) == 'table' then
    if is_added then redis.call('ZREM', queue, waiter, 'seen ' .. attempt) end
    error(kept)
  end
end

-- Answers an attempt that cannot have the lock now, and queues it. Else it returns nil, the holder
-- (false: the lock is free), and whether the attempt is queued.
local function wait(lock, queue, attempt, place, call)
  local waiter = call.terms and attempt .. call.terms
  local scores = redis.call('ZMSCORE', queue, 'ended ' .. attempt, waiter or '', 'seen ' .. attempt)
  local is_queued = waiter and scores[2]
  if scores[1] and tonumber(scores[1]) > 2^52 + call.time then return -1 end
  local holder = unless_wrong_type(redis.pcall('GET', lock))
  if holder == nil then return -2 end
  if not holder then return nil, false, is_queued end
  local pttl = redis.call('PTTL', lock)
  if pttl == -1 then return -3 end
  if holder == attempt then return nil, holder, is_queued end
  if waiter then enqueue(queue, attempt, waiter, place, scores, call) end
  return {pttl, call.time}
end

-- The words of one lock are checked here for all that the common case does not answer.
if node and verb == 'acquire' then
  local known = redis.call('HMGET', node, 'run', 'min_token', 'high', 'ttl')
  local numbers = (known[2] or '0') .. ' ' .. (known[3] or '0') .. ' ' .. (known[4] or '0')
  if not string.find(numbers, '^%d+ %d+ %d+$') then
    return {err = 'ERR the admission of the node is spoilt'}
  end
  call.node, call.admission = node, known
end
local is_late = grant_before and time >= tonumber(grant_before)
local holders, queued, rest = {}, {}, {}
local seen = n > 1 and {} -- locks that occurred in the call: 'left' if a later section serves them
for _, i in ipairs(left) do
  local lock, attempt = KEYS[i], ARGV[1 + i]
  local number = words > 1 and ARGV[1 + n + i] or '' -- queued_at or last_token
  local proposal = words > 2 and ARGV[1 + 2 * n + i] or ''
  if words > 0 and (attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true))
    or number ~= ''
      and not (string.find(number, '^[1-9]%d*$') and number + 0 < (words > 2 and 2^52 or 2^53))
    or proposal ~= ''
      and not (string.find(proposal, '^[1-9]%d*$') and proposal + 0 <= time + 86400000000) then
    answers[i] = -5
  elseif verb ~= 'acquire' then
    rest[#rest + 1] = i
  elseif is_late or node and call.admission[1] ~= run then
    answers[i] = is_late and -1 or -9
  elseif seen and all == '1' and seen[lock] then
    answers[i] = -5
  elseif raised and raised[i] then
    rest[#rest + 1], holders[i] = i, false -- free, and without a queue
  elseif seen and seen[lock] == 'left' then
    rest[#rest + 1] = i -- after the earlier request for the same lock
  elseif minimum and minimum > time + 86400000000 and proposal == '' then
    answers[i] = -5 -- also if it is in use: a release would grant it with a smaller token
  else
    local ok, answer, holder, is_queued =
      pcall(wait, lock, KEYS[n + i], attempt, number ~= '' and number or nil, call)
    if ok and answer == nil then
      rest[#rest + 1], holders[i], queued[i] = i, holder, is_queued
    else
      answers[i] = to_answer(ok, answer)
    end
    call.work = call.work + 4
  end
  if seen and seen[lock] ~= 'left' then seen[lock] = answers[i] == nil and 'left' or 'answered' end
end

-- One request in sixteen cleans its queue, by the clock: in a call, the lock of this number and
-- each sixteenth after it; none if the number is above n.
local cleans = (claim or remember == '1' or force == '1') and 16 - time % 16 or n + 1
if #rest == 0 and cleans > n and all ~= '1' then
  if n == 1 and type(answers[1]) == 'string' then return {err = answers[1]} end
  return answers
end

-- -------------------------------------------------------------------------- a lock that is granted

-- The parts of a waiter's entry; nothing if it was written by hand: a claim of 20 digits, or one
-- that begins with 0, would make the grant fail half-way, and a release publishes with the rights
-- of its own user, so only to channels of this form.
local function parse(entry)
  local attempt, kind, claim_ms, channel, rest =
    string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]* ?%d* ?%d*)$')
  if not attempt or claim_ms + 0 > 60000 or channel ~= ''
    and not (#channel > 36 and string.find(channel, '^wake:%x+$', -37)
      or #channel > 37 and string.find(channel, '^wake:%x+~$', -38)) then
    return nil
  end
  local tokens = rest ~= '' and string.match(rest, '^[^ ]* %d* (%d+)$') or '1'
  if tokens + 0 < 1 or tokens + 0 > 1000 then return nil end
  return attempt, kind, claim_ms, channel, tokens + 0
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark. It also counts as alive if the clock was set back a little.
local function is_alive(queue, attempt, place, claim_ms, time)
  if place < 0 then place = place + 2^52 end -- a reader of a read-write lock on the same key
  return math.abs(time - place) < claim_ms * 1000
    or (tonumber(redis.call('ZSCORE', queue, 'seen ' .. attempt)) or 0) > 2^52 + 61000000 + time
end

-- Raises the counter, and returns the first of the new tokens, all larger than `least`. INCRBY is
-- enough until the counter is lost or the clock has passed it. `last`: it was raised before.
-- Returns nil and a refusal if the counter is spoilt, or `least` a day ahead of the clock.
local function next_tokens(fence, least, count, last, call)
  last = last or redis.pcall('INCRBY', fence, count == 1 and '1' or count)
  if type(last) == 'table' then return nil, last end
  if last > count and last - count >= least and last < 2^53 then return last - count + 1 end
  local first = math.max(least + 1, call.time)
  local refusal
  if last >= 2^53 then
    refusal = {err = 'ERR the fencing counter is at 2^53'}
  elseif least > call.time + 86400000000 then
    refusal = -5
  else
    local text = string.format('%.0f', first + count - 1)
    refusal = redis.pcall('SET', fence, text, 'PX', call.token_ttl_ms)
    if not refusal.err then return first end
  end
  if last == count then redis.call('DEL', fence) else redis.call('DECRBY', fence, count) end
  return nil, refusal
end

-- Grants the free lock, for its claim, to the waiter that has waited longest and is alive, unless
-- `attempt` comes before it. Waiters of other kinds keep their places, dead ones lose theirs: each
-- call removes some, and until all are removed the lock is busy, so that nothing overtakes.
--
-- Returns for how long the lock is busy now, nil if nothing waits; whether it was granted; a
-- refusal, if there is no token for the waiter: a release still frees the lock, but no other
-- attempt may be granted it before the waiter; a token that was reserved for a dead waiter; and
-- whether a dead waiter has the lock.
local function grant_next(lock, queue, fence, attempt, call)
  local others, token, reserved, was_set, refusal = 0, nil, 0, false, nil
  for _ = 1, 128 do
    call.work = call.work + 5
    local at = others == 0 and '0' or others
    local first = redis.pcall('ZRANGE', queue, at, at, 'WITHSCORES')
    if first.err then first = unless_wrong_type(first) or {} end
    local entry, place = first[1], tonumber(first[2])
    if not entry or place >= 2^52 then
      return nil, false, nil, reserved == call.count and token or nil, was_set
    end
    local waiter, kind, claim_ms, channel, count = parse(entry)
    if waiter == attempt then
      return nil, false, nil, reserved == call.count and token or nil, was_set
    end
    local alive = waiter and is_alive(queue, waiter, place, claim_ms, call.time)
    if alive and kind ~= 'mutex' then
      others = others + 1
    else
      if alive and reserved ~= count then
        token, refusal = next_tokens(fence, call.minimum, count, nil, call)
        if not token then break end
        reserved = count
      end
      redis.call('ZREM', queue, entry, 'seen ' .. (waiter or ''))
      -- The lock is the waiter's before the waiter is notified: if SET is refused, two attempts
      -- would take themselves for the holder. The waiter keeps its place then.
      local set = alive and redis.pcall('SET', lock, waiter, 'PX', claim_ms) or {}
      if set.err then
        redis.call('ZADD', queue, first[2], entry)
        redis.call('PEXPIRE', queue, '60000')
        refusal = set
        break
      end
      if alive and channel == '' then return claim_ms + 0, true end
      if alive then
        was_set, call.now = true, call.now or string.format('%.0f', call.time)
        -- Replicas do not publish it: their subscribers are not counted, and must not be notified
        -- of a lock that may be granted to the next waiter.
        redis.set_repl(redis.REPL_NONE)
        local receivers = redis.pcall('PUBLISH', channel,
          waiter .. string.format(' %.0f ', token) .. call.now .. ' ' .. lock)
        redis.set_repl(redis.REPL_ALL)
        -- Without a subscriber, the waiter is dead. With "~", it may listen to another node of a
        -- cluster, which PUBLISH does not count. An error: this user may not publish there.
        if receivers ~= 0 or string.byte(channel, -1) == 126 then return claim_ms + 0, true end
      end
    end
  end
  if was_set then redis.call('DEL', lock) end -- dead waiters had it
  if refusal then return nil, false, refusal end
  return 10, false
end

-- Quorum: the refusal of the proposed tokens, unless they are larger than all that this node has
-- accepted. An attempt that has the lock may propose its own `again`.
local function refuse_proposal(fence, first, again, call)
  local accepted = redis.pcall('GET', fence) or '0'
  if type(accepted) == 'table' then return accepted end
  local least = call.admission and call.admission[2] or '0'
  if not string.find(accepted .. ' ' .. least, '^%d+ %d+$') or tonumber(accepted) >= 2^53 then
    return {err = 'ERR the largest accepted token is spoilt'}
  end
  local highest = math.max(tonumber(accepted), tonumber(least))
  local is_known = again and highest == first + call.count - 1
  if highest >= first and not is_known then return {-8, highest} end
end

-- Quorum: the proposed tokens, or nil and a refusal. A lease that is repaired after larger tokens
-- were accepted has none on this node.
local function accept(fence, first, again, call)
  local is_repair, node = call.purpose == 'repair', call.admission
  local refusal = refuse_proposal(fence, first, again or is_repair, call)
  local last = first + call.count - 1
  if refusal and is_repair and not refusal.err then return 0 end
  if refusal then return nil, refusal end
  if node and last > tonumber(node[3] or 0) then
    node[3] = last
    redis.call('HSET', call.node, 'high', string.format('%.0f', last))
  end
  redis.call('SET', fence, string.format('%.0f', last), 'PX', call.token_ttl_ms)
  return first
end

-- Acquires a lock that is free, or that the attempt has: then this is a second delivery, or a poll
-- that finds what a release granted. Returns the token, and whether the lock is granted anew.
local function acquire(lock, queue, fence, attempt, place, proposal, holder, is_queued, raised,
                       call)
  local token, refusal, was_set
  if raised then
    token, refusal = next_tokens(fence, call.minimum, call.count, raised, call)
  elseif not holder then
    local busy_ms, _, no_token, spare, is_set = grant_next(lock, queue, fence, attempt, call)
    if no_token then return no_token end
    if busy_ms then
      if call.terms then enqueue(queue, attempt, attempt .. call.terms, place, nil, call) end
      return {busy_ms, call.time}
    end
    token, was_set = spare, is_set
  elseif call.has_token and not proposal then
    local last = redis.call('GET', fence) or ''
    last = string.find(last, '^%d+$') and tonumber(last) or 0
    if last >= call.count and last < 2^53 then token = last - call.count + 1 end
  end
  if proposal then
    token, refusal = accept(fence, proposal, holder, call)
  elseif not call.has_token then
    token = 0
  elseif not token and not refusal then
    token, refusal = next_tokens(fence, call.minimum, call.count, nil, call)
  end
  if not token then
    if was_set then redis.call('DEL', lock) end
    return refusal
  end
  local node = call.admission
  if node and tonumber(call.ttl_ms) > tonumber(node[4] or 0) then -- an admission waits for it
    node[4] = call.ttl_ms
    redis.call('HSET', call.node, 'ttl', call.ttl_ms)
  end
  if holder then
    redis.call('PEXPIRE', lock, call.ttl_ms)
    return token
  end
  redis.call('SET', lock, attempt, 'PX', call.ttl_ms)
  local removed = is_queued
    and redis.pcall('ZREM', queue, attempt .. call.terms, 'seen ' .. attempt)
  if type(removed) == 'table' then
    redis.call('DEL', lock)
    error(removed)
  end
  return token, true
end

-- Writes down that the attempt has ended, with this answer, and returns the answer. The score of
-- the mark: 2^52, the second until which it counts, in microseconds, and the answer plus 10.
local function record_end(queue, attempt, answer, time)
  -- A full server refuses ZADD as the first write of a script. ZREM comes first, of nothing: if it
  -- removed the last entry, the queue would be deleted and created again.
  redis.call('ZREM', queue, '')
  local mark = string.format('%.0f', 2^52 + time - time % 1000000 + 60000010 + answer)
  redis.call('ZADD', queue, mark, 'ended ' .. attempt)
  local kept = redis.pcall('PEXPIRE', queue, '60000')
  if type(kept) == 'table' then
    redis.call('ZREM', queue, 'ended ' .. attempt)
    error(kept)
  end
end

-- Releases the lock; leaves the queue; or revokes the lock, from a holder or, with '', from any.
local function release(lock, queue, fence, attempt, last_token, remembers, revoke_from, call)
  if remembers then -- a second delivery gets the first answer, and changes nothing
    local mark = tonumber(redis.call('ZSCORE', queue, 'ended ' .. attempt))
    if mark and mark > 2^52 + call.time then return (mark - 2^52) % 1000000 - 10 end
  end
  local holder = unless_wrong_type(redis.pcall('GET', lock))
  local answer, is_over = 0, false
  if holder == nil then
    answer = -2
  elseif not revoke_from then
    is_over = holder == attempt
    answer = is_over and 1 or 0
  elseif redis.call('PTTL', lock) == -1 then
    answer = -3
  elseif revoke_from == '' or holder == revoke_from then
    is_over, answer = true, holder and 1 or 0
  end
  if remembers then record_end(queue, attempt, answer, call.time) end
  -- A server that refuses writes reports that only if there is something to remove.
  local waiter = call.terms and attempt .. call.terms
  if waiter and unless_wrong_type(redis.pcall('ZSCORE', queue, waiter)) then
    redis.call('ZREM', queue, waiter, 'seen ' .. attempt)
  end
  if not is_over then return answer end
  if revoke_from then
    -- The token of the former holder is not the last one any more, as its client can find out.
    if answer == 1 and redis.call('EXISTS', fence) == 1 then redis.pcall('INCRBY', fence, '1') end
  elseif last_token then
    local counter = unless_wrong_type(redis.pcall('GET', fence)) or ''
    local last = string.find(counter, '^%d+$') and tonumber(counter)
    if last and last > last_token and last < last_token + call.count then
      -- If this is refused, as on a full server, the counter stays where it is.
      redis.pcall('DECRBY', fence, string.format('%.0f', last - last_token))
    end
  end
  local _, is_granted = grant_next(lock, queue, fence, attempt, call)
  if not is_granted then redis.call('DEL', lock) end
  return answer
end

-- With `all`: what keeps a lock from being granted that is free, or that the attempt has; nil if
-- nothing does: then all are granted. Changes nothing.
local function find_obstacle(queue, fence, attempt, proposal, holder, call)
  for _, entry in ipairs(holder and {} or redis.call('ZRANGE', queue, '0', '127')) do
    local waiter, kind, claim_ms = parse(entry)
    local place = kind == 'mutex' and tonumber(redis.call('ZSCORE', queue, entry))
    if waiter == attempt then break end
    if place and is_alive(queue, waiter, place, claim_ms, call.time) then
      return {claim_ms + 0, call.time}
    end
  end
  if proposal then
    local is_repair = call.purpose == 'repair'
    local refusal = refuse_proposal(fence, proposal, holder or is_repair, call)
    if refusal and (refusal.err or not is_repair) then return refusal end
    return nil
  end
  local counter = call.has_token and redis.call('GET', fence) or '0'
  if not string.find(counter, '^%-?%d+$') or tonumber(counter) + call.count >= 2^53 then
    return {err = 'ERR the fencing counter is not a number below 2^53'}
  end
end

local is_blocked, is_new = false, {}
for i = 1, all == '1' and n or 0 do
  if answers[i] == nil then
    answers[i] = to_answer(pcall(find_obstacle, KEYS[n + i], KEYS[2 * n + i], ARGV[1 + i],
      tonumber(ARGV[1 + 2 * n + i]), holders[i], call))
  end
  is_blocked = is_blocked or answers[i] ~= nil
end

local remembers, revoke_from = remember == '1' or force == '1', force == '1' and (only_from or '')
for order, i in ipairs(not is_blocked and words > 1 and rest or {}) do
  local lock, queue, fence, attempt = KEYS[i], KEYS[n + i], KEYS[2 * n + i], ARGV[1 + i]
  local number, ok, answer = ARGV[1 + n + i], true, nil
  local is_raised = raised and raised[i] -- its counter must not be left without a TTL
  if order > 1 and call.work > 2000 and all ~= '1' and not is_raised then -- about 3 ms
    answer = -10
  elseif verb == 'release' then
    ok, answer = pcall(release, lock, queue, fence, attempt, tonumber(number), remembers,
      revoke_from, call)
    if not ok and remembers then redis.pcall('ZREM', queue, 'ended ' .. attempt) end
  else
    local place = number ~= '' and number or nil
    if holders[i] == nil then -- the same lock again
      ok, answer, holders[i], queued[i] = pcall(wait, lock, queue, attempt, place, call)
    end
    if answer == nil then
      ok, answer, is_new[i] = pcall(acquire, lock, queue, fence, attempt, place,
        tonumber(ARGV[1 + 2 * n + i]), holders[i], queued[i], raised and raised[i], call)
    end
  end
  answers[i] = to_answer(ok, answer)
  call.work = call.work + 4
end
-- An error that could not be foreseen, as a missing right, takes all back.
for i = 1, all == '1' and n or 0 do
  is_blocked = is_blocked or type(answers[i]) ~= 'number' or answers[i] < 0
end
for i = 1, is_blocked and n or 0 do
  if is_new[i] then redis.call('DEL', KEYS[i]) end
  if answers[i] == nil or type(answers[i]) == 'number' and answers[i] >= 0 then answers[i] = -10 end
end

-- ---------------------------------------------------------------------------------- the rare cases

if verb == 'inspect' or verb == 'renew' then
  local function inspect(lock, queue, fence, call)
    local holder = unless_wrong_type(redis.pcall('GET', lock))
    if holder == nil then return {-2, '0', 0, call.time} end
    local waiters = redis.pcall('ZCOUNT', queue, '-inf', '(4503599627370496') -- 2^52
    waiters = unless_wrong_type(waiters) or 0
    local token = unless_wrong_type(redis.pcall('GET', fence)) or '0'
    if not string.find(token, '^%d+$') or tonumber(token) >= 2^53 then token = '0' end
    if not holder then return {1, token, waiters, call.time} end
    return {1, token, waiters, call.time, holder, 1, redis.call('PTTL', lock)}
  end
  -- Another attempt holds the lock, or none.
  local function refuse_renewal(lock)
    return unless_wrong_type(redis.pcall('GET', lock)) == nil and -2 or 0
  end
  for _, i in ipairs(rest) do
    local operation = verb == 'renew' and refuse_renewal or inspect
    answers[i] = to_answer(pcall(operation, KEYS[i], KEYS[n + i], KEYS[2 * n + i], call))
  end
end

-- Removes marks that have expired, and some random waiters that are dead. If a quarter of them was
-- dead, it looks at more. Of the marks that releases leave, 20,000 are kept. An error here has no
-- effect on a lock, so it is not answered.
if cleans <= n then
  local function clean(queue, call)
    local time, size = call.time, 16
    local last_mark = 2^52 + time - time % 1000000 + 61000000
    redis.call('ZREMRANGEBYSCORE', queue, 2^52, 2^52 + time)
    if redis.call('ZCOUNT', queue, 2^52, last_mark) > 20000 then
      redis.call('ZREM', queue,
        unpack(redis.call('ZRANGEBYSCORE', queue, 2^52, last_mark, 'LIMIT', 0, 1600)))
    end
    for _ = 1, 4 do
      local some, dead = redis.call('ZRANDMEMBER', queue, size, 'WITHSCORES'), {}
      for at = 1, #some, 2 do
        local entry, place = some[at], tonumber(some[at + 1])
        local waiter, _, claim_ms = parse(entry)
        if place < 2^52 and not (waiter and is_alive(queue, waiter, place, claim_ms, time)) then
          dead[#dead + 1] = entry
        end
      end
      if dead[1] then redis.call('ZREM', queue, unpack(dead)) end
      if #dead * 4 < size then break end
      size = 128
    end
  end
  for i = cleans, n, 16 do pcall(clean, KEYS[n + i], call) end
end
if n == 1 and type(answers[1]) == 'string' then return {err = answers[1]} end
return answers
