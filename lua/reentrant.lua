-- redlatch, wire version 1: the re-entrant lock. Licence: MIT OR Apache-2.0.
--
-- A lock that one owner holds at a time, for a lease, and may hold several times: each hold has an
-- attempt of its own. Clients that find it in use may queue: a release of the last hold grants it
-- to the next waiter, and notifies it. README.md says what a client does with the answers. Each
-- lock has three keys:
--
--   lock     lock:backup              hash; its TTL is the longest lease of the holds:
--                                       mode        reentrant <token>
--                                       <owner>     how many holds it has
--                                       :<attempt>  1, for each hold
--                                     A Redisson RLock is a field <owner> without the others. Its
--                                     holds may be beside or inside those of the same owner here.
--   waiters  {lock:backup}:waiters    sorted set, by score:
--                                       attempt reentrant claim_ms channel owner max_depth [tokens]
--                                                         a waiter, at its place: the microsecond
--                                                         it queued
--                                       ended attempt     2^52 + second to keep it, in
--                                                         microseconds + answer + 10
--                                       seen attempt      2^52 + 61000000 + when the waiter counts
--                                                         as dead
--   fence    {lock:backup}:fence      string: the last fencing token, a number that grows
--
-- One call serves 1 to 128 locks, which need not belong together, in order:
--
--   EVALSHA sha1 numkeys  lock... waiters... fence... [node]
--     verb  <first word of each lock>... <second word of each lock>...  words shared by all locks
--
--   verb      words of each lock                 shared words
--   acquire   attempt owner queued_at proposal   ttl_ms [min_token claim_ms channel max_depth
--                                                grant_before token_ttl_ms tokens all purpose run]
--   renew     attempt owner                      ttl_ms [successor run]
--   release   attempt owner last_token           [min_token remember claim_ms channel max_depth
--                                                token_ttl_ms tokens force only_from keep_ms]
--   inspect
--
-- An empty word is the default, and trailing shared words may be left out. The answer is a list
-- with one answer for each lock. An error of one lock is its answer, as a text; the only lock of a
-- call answers it as an error. The integer -5 instead of a list: the call as a whole is malformed.
--
--   attempt       up to 128 bytes, no space; new for every hold, the same in each request of it,
--                 as are owner, claim_ms, channel, max_depth and tokens; with all, no claim_ms
--   owner         1 to 256 bytes, no space, not "mode", not beginning with ":"; with force: unused
--   queued_at     1 to 2^52 - 1: the waiter's place, when it was first answered busy; default: now
--   proposal      quorum: the token to accept, 1 to a day ahead of the clock in microseconds
--   last_token    0 to 2^53 - 1: of several tokens that were reserved, the last one used, or if the
--                 owner is the attempt, 0 for none: the counter goes back to it if this was the
--                 last hold. Empty if acquire answered 0; never 0 for a successor
--   ttl_ms        1 to 9999999999, counted from now
--   min_token     below 2^52, at most a day ahead of the clock in microseconds, and usually that
--                 clock: the token is larger than this, unless a release grants it; default: no
--                 token. In each release: the token of the next waiter is larger; default: 0, also
--                 for one too large or malformed
--   claim_ms      1 to 60000: queue if the lock is in use, and keep it so long for the waiter that
--                 it is granted to; a waiter that did not poll for so long is dead; default: do
--                 not queue. In a release: also leave the queue, with the channel, max_depth and
--                 tokens of acquire
--   channel       where to publish "attempt token microsecond lock" for the waiter: up to 256
--                 bytes, no space, ends in "wake:" and 32 hexadecimal digits, and "~" in a cluster,
--                 which does not count all subscribers; default: the waiter polls
--   max_depth     1 to 1024: how many holds the owner may have; default: 255
--   grant_before  refuse the attempts from this microsecond on; default: never
--   token_ttl_ms  1 to 9999999999: how long a new counter is kept; default: 3600000
--   tokens        1 to 1000: how many tokens to reserve, with min_token or proposal; default: 1; a
--                 nested hold reserves none. In a release: as in acquire
--   all           1: all locks or none; not with claim_ms. Default: each for itself
--   purpose       quorum: "nested" (also inside a hold with another token) or "repair" (a lease
--                 that other nodes hold); default: a new lease
--   run           with the key node, of node.lua: the run id of this server, which must be admitted
--   remember      1: refuse the attempt from now on, and repeat this answer, for a minute (of one
--                 lock, for the newest 19,000 attempts). If it may be queued, with claim_ms
--   force         1: revoke all holds of any owner; attempt is new for the call; implies remember
--   only_from     with force, an owner: only if it holds the lock
--   successor     up to 128 bytes, no space, never queued: the attempt that has the hold from now
--                 on; attempt is refused. Default: the hold stays with its attempt
--   keep_ms       1 to 9999999999, not with force: if this ends the last hold, the lock
--                 stays held for so long, by "kept-" and the attempt, which clients must not send
--
--   acquire  token          granted: the first of its tokens; 0: without a token. A nested hold has
--                           the token of the lock, and the TTL becomes the longer one. A second
--                           delivery gets the same, and grants nothing more; its lease begins anew
--            {pttl, time}   in use: poll again in pttl ms at most, and if queued within claim_ms;
--                           the clock in microseconds
--            -4             refused: the owner has max_depth holds
--            {-8, highest}  quorum: refused, this accepted token is not smaller than the proposal
--   renew    time           held for at least ttl_ms from now
--            0              lost: expired, released, or another owner's. With successor, a second
--                           delivery is answered as the first one
--   release  1 + n          released; the owner has n holds left, for the same TTL. With none left:
--                           granted to the next waiter, or free; or held for keep_ms
--            n              force: all n holds of the owner were revoked
--            0              the attempt held nothing. A second delivery changes nothing
--   inspect  {1, token, waiters, time}, and if it is held: owner, holds, pttl (-1:
--                           none). token is a text
--            {-2, '0', 0, time}
--   any      -1             acquire, renew with successor: refused, the attempt was ended, or
--                           comes too late
--            -2             refused: the key holds something else; force: or Redisson has a hold;
--                           for renew: lost
--            -3             acquire, force: refused, the key has no TTL
--            -5             refused: a word is malformed. renew and a plain release may serve a
--                           malformed owner or attempt that the key holds
--            -9             quorum, acquire, and renew with successor: refused, the node was
--                           not admitted since it started
--            -10            not served, and no hold was changed: the call had too much to do, or
--                           with `all`, another lock was not granted

-- ------------------------------------------------------------------------------------------ checks
-- An empty word is the default. The words that all locks share are checked here, those of a lock
-- where it is served.

-- The text as a number, if it is one of 1 to `highest`.
local function up_to(highest, text)
  local number = string.find(text, '^[1-9]%d*$') and text + 0
  return number and number <= highest and number or nil
end

-- Whether scripts may publish there: a release does so with the rights of its own user, to whatever
-- channel was queued.
local function is_channel(text)
  return #text <= 256 and not string.find(text, ' ', 1, true)
    and (#text > 36 and string.find(text, '^wake:%x+$', -37)
      or #text > 37 and string.find(text, '^wake:%x+~$', -38))
end

local verb, node = ARGV[1], #KEYS % 3 == 1 and KEYS[#KEYS] or nil
local n = (#KEYS - (node and 1 or 0)) / 3
local words = verb == 'acquire' and 4 or verb == 'release' and 3 or verb == 'renew' and 2
  or verb == 'inspect' and 0 -- of each lock
if not words or n < 1 or n > 128 or #KEYS % 3 == 2 or #ARGV < 1 + words * n then return -5 end

local ttl_ms, min_token, claim_ms, channel, max_depth, grant_before, token_ttl_ms, tokens
local all, purpose, run, remember, force, only_from, keep_ms, successor
if verb == 'release' then
  min_token, remember, claim_ms, channel, max_depth, token_ttl_ms, tokens, force, only_from,
    keep_ms = unpack(ARGV, 2 + 3 * n)
elseif verb == 'renew' then
  ttl_ms, successor, run = unpack(ARGV, 2 + 2 * n)
  if successor == '' then successor = nil end
elseif verb == 'acquire' then
  ttl_ms, min_token, claim_ms, channel, max_depth, grant_before, token_ttl_ms, tokens, all, purpose,
    run = unpack(ARGV, 2 + 4 * n)
end
local has_ttl = verb == 'acquire' or verb == 'renew'
if has_ttl and not up_to(9999999999, ttl_ms or '') then return -5 end
local minimum
if verb == 'acquire' and min_token and min_token ~= '' then
  minimum = string.find(min_token, '^%d+$') and min_token + 0
  if not minimum or minimum >= 2^52 then return -5 end
end
local claim, count, depth = nil, 1, 255
local has_more = #ARGV > words * n + (verb == 'release' and 2 or 3) -- than the first ones
if has_more then
  claim = up_to(60000, claim_ms or '')
  count = (tokens or '') == '' and 1 or up_to(1000, tokens)
  depth = (max_depth or '') == '' and 255 or up_to(1024, max_depth)
  if grant_before == '' then grant_before = nil end
  if token_ttl_ms == '' then token_ttl_ms = nil end
  if only_from == '' then only_from = nil end
  if keep_ms == '' then keep_ms = nil end
  if not count or not depth or claim_ms and claim_ms ~= '' and (not claim or all == '1')
    or channel and channel ~= '' and not is_channel(channel)
    or grant_before and not string.find(grant_before, '^%d+$')
    or token_ttl_ms and not up_to(9999999999, token_ttl_ms)
    or (remember or all or force) and not string.find((remember or '') .. ' ' .. (all or '') .. ' '
      .. (force or ''), '^1? 1? 1?$')
    or purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair'
    or only_from and (#only_from > 256 or string.find(only_from, '^:'))
    or string.find(only_from or '', ' ', 1, true)
    or keep_ms and (force == '1' or not up_to(9999999999, keep_ms)) then
    return -5
  end
end
token_ttl_ms = token_ttl_ms or '3600000'

-- --------------------------------------------------------------------------------- the common case
-- No lock has a holder or a queue; a release or renewal finds its own hold. A lock that takes more
-- than this is left to the next section.

-- Raises the counter, and returns the first of the new tokens, all larger than `least`. INCRBY is
-- enough until the counter is lost, or `least` has reached it. Returns nil and a refusal if the
-- counter is spoilt, or `least` a day ahead of the clock; then the counter stays as it was.
local function next_tokens(fence, least, count, token_ttl_ms)
  local last = redis.pcall('INCRBY', fence, count == 1 and '1' or count) -- a text takes less time
  if type(last) == 'table' then return nil, last end
  if last > count and last - count >= least and last < 2^53 then return last - count + 1 end
  local clock, refusal = redis.pcall('TIME'), -5
  if last >= 2^53 then
    refusal = {err = 'ERR the fencing counter is at 2^53'}
  elseif clock.err then
    refusal = clock
  elseif least <= (clock[1] + 86400) * 1000000 + clock[2] then
    local first = math.max(least + 1, clock[1] * 1000000 + clock[2])
    local text = string.format('%.0f', first + count - 1)
    refusal = redis.pcall('SET', fence, text, 'PX', token_ttl_ms)
    if not refusal.err then return first end
  end
  if last ~= count then
    redis.pcall('DECRBY', fence, count)
  elseif redis.pcall('DEL', fence) ~= 1 then -- it must not be left without a TTL
    redis.pcall('PEXPIRE', fence, token_ttl_ms)
  end
  return nil, refusal
end

local answers, left, clock = {nil}, nil, nil
if verb == 'acquire' then
  local is_plain = not (node or grant_before or purpose == 'repair' or all == '1')
  local are_free = is_plain and redis.call('EXISTS', unpack(KEYS, 1, 2 * n)) == 0
  local seen = n > 1 and {} -- the same lock again is not free any more
  for i = 1, n do
    local lock, attempt, owner, token, accepted = KEYS[i], ARGV[1 + i], ARGV[1 + n + i], nil, nil
    local is_free = are_free or is_plain and n > 1 and redis.call('EXISTS', lock, KEYS[n + i]) == 0
    if is_free and ARGV[1 + 2 * n + i] == ''
      and attempt ~= '' and #attempt <= 128 and not string.find(attempt, ' ', 1, true)
      and owner ~= '' and #owner <= 256 and not string.find(owner, ' ', 1, true)
      and owner ~= 'mode' and string.byte(owner) ~= 58 and not (seen and seen[lock]) then
      local fence, proposal = KEYS[2 * n + i], ARGV[1 + 3 * n + i]
      if proposal ~= '' then
        -- Quorum: granted if it is larger than all that this node has accepted. If the grant fails,
        -- the node forgets it: the same proposal must not be too small then.
        clock = clock or redis.pcall('TIME')
        local known = redis.pcall('GET', fence) or '0'
        if not clock.err and type(known) == 'string' and string.find(known, '^%d+$')
          and up_to((clock[1] + 86400) * 1000000, proposal) and proposal + 0 > known + 0 then
          local last = count == 1 and proposal or string.format('%.0f', proposal + count - 1)
          local set = redis.pcall('SET', fence, last, 'PX', token_ttl_ms)
          if not set.err then token, accepted = proposal + 0, known end
        end
      else
        token = 0
        if minimum then token = next_tokens(fence, minimum, count, token_ttl_ms) end
      end
      local mode = token and string.format('reentrant %.0f', token)
      local set = token and redis.pcall('HSET', lock, 'mode', mode, owner, '1', ':' .. attempt, '1')
      if set == 3 and redis.pcall('PEXPIRE', lock, ttl_ms) ~= 1 then
        set = redis.call('DEL', lock) -- it must not be left without a TTL
      end
      if set ~= 3 then token = nil end
      if accepted and not token then redis.call('SET', fence, accepted, 'PX', token_ttl_ms) end
    end
    if seen then seen[lock] = true end
    answers[i] = token
  end
elseif verb == 'release' then
  local is_plain = not has_more and redis.call('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0
  for i = 1, n do
    local lock, attempt, owner, held = KEYS[i], ARGV[1 + i], ARGV[1 + n + i], {}
    if is_plain and ARGV[1 + 2 * n + i] == '' and string.byte(owner) ~= 58 then
      held = redis.pcall('HMGET', lock, owner, ':' .. attempt)
    end
    if held[2] and held[1] == '1' then
      if redis.pcall('DEL', lock) == 1 then answers[i] = 1 end
    elseif held[2] and (tonumber(held[1]) or 0) > 1
      and (tonumber(redis.pcall('HLEN', lock)) or 0) > 3
      -- HDEL comes first: a full server refuses HINCRBY as the first write of a script.
      and redis.pcall('HDEL', lock, ':' .. attempt) == 1 then
      local others = redis.pcall('HINCRBY', lock, owner, '-1')
      if type(others) == 'number' then
        answers[i] = others + 1
      else
        redis.call('HSET', lock, ':' .. attempt, '1')
      end
    end
  end
elseif verb == 'renew' and not successor then
  clock = redis.call('TIME')
  for i = 1, n do
    local owner, lock = ARGV[1 + n + i], KEYS[i]
    local held = redis.pcall('HMGET', lock, owner, ':' .. ARGV[1 + i], 'mode')
    if held[1] and held[2] and string.byte(owner) ~= 58 and owner ~= 'mode'
      and string.find(held[3] or '', '^reentrant %d+$') and string.sub(held[3], 11) + 0 < 2^53 then
      local pttl = redis.pcall('PTTL', lock)
      if type(pttl) == 'number'
        and (pttl >= ttl_ms + 0 or redis.pcall('PEXPIRE', lock, ttl_ms) == 1) then
        answers[i] = clock[1] * 1000000 + clock[2]
      end
    end
  end
end
for i = 1, n do
  if not answers[i] then
    left = left or {}
    left[#left + 1] = i
  end
end
if not left then return answers end

-- -------------------------------------------------------------------------- one lock after another
-- A function uses only what it receives, and other functions; `call` has what all locks of the call
-- share. An error ends the service of one lock, whose answer it is.

-- An answer, or an error as a text, from its code on, which Redis 6.2 puts into another text.
local function to_answer(ok, answer)
  if ok and not (type(answer) == 'table' and answer.err) then return answer end
  answer = type(answer) == 'table' and answer.err or tostring(answer)
  -- The queue has lost its last entry in this call, and cannot be created anew: see unless_emptied.
  if string.find(answer, 'non local key', 1, true) then return 'TRYAGAIN its slot moves' end
  return string.match(answer, '%u%u%u+ [^\r\n]*') or 'ERR ' .. answer
end

clock = clock or redis.pcall('TIME')
if clock.err and n == 1 then return clock end
if clock.err then
  for _, i in ipairs(left) do answers[i] = to_answer(false, clock) end
  return answers
end
local now = clock[1] .. string.sub('00000' .. clock[2], -6) -- the microsecond
local time = now + 0
if verb == 'release' and string.find(min_token or '', '^%d+$') then minimum = min_token + 0 end
-- This mistake of a client must neither spoil a counter nor keep a lock from being released.
local is_far_ahead = minimum and minimum > time + 86400000000
local call = {
  time = time, now = now, -- a command takes a text in half the time of a number
  ttl_ms = ttl_ms, token_ttl_ms = token_ttl_ms, purpose = purpose, run = run, node = node,
  is_late = grant_before and time >= grant_before + 0, is_far_ahead = is_far_ahead,
  has_token = minimum ~= nil, minimum = not is_far_ahead and minimum or 0,
  count = count, depth = depth, keep_ms = keep_ms, successor = successor,
  -- What stands between the attempt and the owner in an entry of the queue, and after the owner.
  claim = claim, terms = claim and ' reentrant ' .. claim_ms .. ' ' .. (channel or '') .. ' ',
  limits = ' ' .. depth .. (count > 1 and ' ' .. tokens or ''),
  work = 0, -- about how many commands were sent
}

local function is_attempt(text)
  return text ~= '' and #text <= 128 and not string.find(text, ' ', 1, true)
end

local function is_owner(text)
  return text ~= '' and #text <= 256 and not string.find(text, ' ', 1, true)
    and text ~= 'mode' and string.byte(text) ~= 58 -- a colon
end

-- A reply that is not an error; nil if the key holds another type. Any other error, as a missing
-- right, ends the service of the lock.
local function unless_wrong_type(reply)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
end

-- The same for the queue. If the call has removed its last entry while the slot of the key moves, a
-- cluster refuses to read it ("a non local key"): then nothing waits.
local function unless_emptied(reply)
  local is_gone = type(reply) == 'table' and string.find(reply.err or '', 'non local key', 1, true)
  return not is_gone and unless_wrong_type(reply) or nil
end

-- The entry of the attempt in the queue.
local function entry_of(attempt, owner, call)
  return attempt .. call.terms .. owner .. call.limits
end

-- Queues the attempt at its place; or if it is queued, notes that it was seen, which counts for one
-- claim. `scores` are those of its mark of an end, its entry, and its mark of having been seen.
local function enqueue(queue, attempt, waiter, place, scores, call)
  local is_queued = scores and scores[2]
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

-- The parts of a waiter's entry; nothing if it was written by hand: a claim of 20 digits, or one
-- that begins with 0, would make the grant fail half-way.
local function parse(entry)
  local attempt, kind, claim_ms, channel, owner, tokens =
    string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]*) ?%d* ?(%d*)$')
  if not attempt or claim_ms + 0 > 60000 then return end
  if channel ~= '' and not is_channel(channel) then return end
  local count = tokens == '' and 1 or tokens + 0
  if count < 1 or count > 1000 then return end
  return attempt, kind, claim_ms, channel, owner, count
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark. It also counts as alive if the clock was set back a little.
local function is_alive(queue, attempt, place, claim_ms, time)
  if place < 0 then place = place + 2^52 end -- a reader of a read-write lock on the same key
  return math.abs(time - place) < claim_ms * 1000
    or (tonumber(redis.call('ZSCORE', queue, 'seen ' .. attempt)) or 0) > 2^52 + 61000000 + time
end

-- The token of the lock, 0 if it has none; nil if the hash is something else. A Redisson RLock is
-- one field `<UUID>:<thread>` -> count.
local function token_of(lock, mode)
  if mode then
    local token = tonumber(string.match(mode, '^reentrant (%d+)$') or nil)
    return token and token < 2^53 and token or nil
  end
  local field = redis.call('HLEN', lock) == 1 and redis.call('HRANDFIELD', lock)
  local is_redisson = field and string.find(field, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    and tonumber(redis.call('HGET', lock, field))
  return is_redisson and 0 or nil
end

-- Makes the attempt the only holder. `fields`, those of the former holder, are removed, and become
-- those of the new one. They are removed last: if the key was deleted first, a cluster whose slot
-- moves would refuse to create it again, and the waiter would have neither its place nor the lock.
-- Returns an error if that failed: then the former holder has the lock, or none.
local function set_holder(lock, fields, attempt, owner, token, lease_ms)
  local hold, mode = ':' .. attempt, string.format('reentrant %.0f', token)
  local reply = redis.pcall('HSET', lock, 'mode', mode, owner, '1', hold, '1')
  if type(reply) == 'table' then return reply end
  reply = redis.pcall('PEXPIRE', lock, lease_ms)
  for at = #fields, 1, -1 do
    local field = fields[at]
    if field == 'mode' or field == owner or field == hold then table.remove(fields, at) end
  end
  for at = 1, type(reply) ~= 'table' and #fields or 0, 1000 do
    reply = redis.pcall('HDEL', lock, unpack(fields, at, math.min(at + 999, #fields)))
    if type(reply) == 'table' then break end
  end
  for at = #fields, 3, -1 do fields[at] = nil end
  fields[1], fields[2] = owner, hold
  if type(reply) ~= 'table' then return nil end
  redis.call('DEL', lock)
  return reply
end

-- Grants the lock, for its claim, to the waiter that has waited longest and is alive, unless
-- `attempt` comes before it. Waiters of other kinds keep their places, dead ones lose theirs.
-- `fields` are those of the holder that leaves, or of the last dead waiter that was granted it.
-- What the lock is then:
--   'granted', ms     to a waiter, for so long
--   'busy', ms        not yet: nothing may overtake 128 waiters that are dead, or of other kinds
--   'free', entry     no waiter comes before the attempt; its own entry, if it is the first
--   'refused', why    there is no token for the waiter: a release still frees the lock, but no
--                     other attempt may be granted it before the waiter
local function grant_next(lock, queue, fence, fields, attempt, call)
  -- Those of a dead waiter stay reserved if none follows it: it may have the lock for its claim.
  local others, token, reserved = 0, nil, 0
  for _ = 1, 128 do
    call.work = call.work + 8
    local at = others == 0 and '0' or others
    local first = unless_emptied(redis.pcall('ZRANGE', queue, at, at, 'WITHSCORES')) or {}
    local entry, place = first[1], tonumber(first[2])
    if not entry or place >= 2^52 then return 'free' end
    local waiter, kind, claim_ms, channel, owner, count = parse(entry)
    if waiter == attempt then return 'free', entry end
    local alive = waiter and is_alive(queue, waiter, place, claim_ms, call.time)
    if alive and kind ~= 'reentrant' then
      others = others + 1
    else
      if alive and reserved ~= count then -- else a dead waiter did not use them
        if reserved > 0 then redis.pcall('DECRBY', fence, reserved) end
        local refusal
        token, refusal = next_tokens(fence, call.minimum, count, call.token_ttl_ms)
        if not token then return 'refused', refusal end
        reserved = count
      end
      -- The lock is the waiter's before its entry is removed, and before it is notified: if one of
      -- these is refused, as to a user without the right, it keeps its place.
      local refusal = alive and set_holder(lock, fields, waiter, owner, token, claim_ms)
      if refusal then return 'refused', refusal end
      local removed = redis.pcall('ZREM', queue, entry, 'seen ' .. (waiter or ''))
      if type(removed) == 'table' then return 'refused', removed end
      if alive and channel == '' then return 'granted', claim_ms + 0 end
      if alive then
        -- Replicas do not publish it: their subscribers are not counted, and must not be notified
        -- of a lock that may be granted to the next waiter.
        redis.set_repl(redis.REPL_NONE)
        local receivers = redis.pcall('PUBLISH', channel,
          waiter .. string.format(' %.0f ', token) .. call.now .. ' ' .. lock)
        redis.set_repl(redis.REPL_ALL)
        -- Without a subscriber, the waiter is dead. With "~", it may listen to another node of a
        -- cluster, which PUBLISH does not count. An error: this user may not publish there.
        if receivers ~= 0 or string.byte(channel, -1) == 126 then
          return 'granted', claim_ms + 0
        end
      end
    end
  end
  return 'busy', 10
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
    redis.call('HSET', call.node, 'high', string.format('%.0f', last))
    node[3] = last
  end
  call.accepted = redis.call('GET', fence) or '0'
  redis.call('SET', fence, string.format('%.0f', last), 'PX', call.token_ttl_ms)
  return first
end

-- What an attempt is answered that cannot have the lock now; if it claims, it is queued. Else nil,
-- the holds of its owner (false: the lock is free), and whether the attempt is queued.
local function refuse(lock, queue, attempt, owner, queued_at, proposal, call)
  if not is_attempt(attempt) or not is_owner(owner)
    or queued_at ~= '' and not up_to(2^52 - 1, queued_at)
    or proposal ~= '' and not up_to(call.time + 86400000000, proposal) then
    return -5
  end
  if call.is_late then return -1 end
  if call.node and call.admission[1] ~= call.run then return -9 end
  -- Also if the lock is in use: a release would grant it with a smaller token.
  if call.is_far_ahead and proposal == '' then return -5 end
  local waiter = call.terms and entry_of(attempt, owner, call)
  local scores = redis.call('ZMSCORE', queue, 'ended ' .. attempt, waiter or '', 'seen ' .. attempt)
  if scores[1] and tonumber(scores[1]) > 2^52 + call.time then return -1 end
  local held = unless_wrong_type(redis.pcall('HMGET', lock, owner, ':' .. attempt, 'mode'))
  if not held then return -2 end
  local pttl, is_queued = redis.call('PTTL', lock), waiter and scores[2]
  if pttl == -1 then return -3 end
  if pttl == -2 then return nil, false, is_queued end
  local token, count, has_attempt = token_of(lock, held[3]), tonumber(held[1] or 0), held[2]
  if not token or not count then return -2 end
  if held[1] then
    if not has_attempt and count >= call.depth then return -4 end
    return nil, {
      count = count, has_attempt = has_attempt, token = token, mode = held[3], pttl = pttl,
      may_propose = has_attempt and count == 1 or call.purpose == 'nested',
    }, is_queued
  end
  if waiter then enqueue(queue, attempt, waiter, queued_at ~= '' and queued_at, scores, call) end
  return {pttl, call.time}
end

-- Removes a hold that was added. `hold` is the state before that.
local function undo_hold(lock, attempt, owner, hold)
  redis.call('HSET', lock, owner, hold.count, 'mode', hold.mode or '')
  redis.call('HDEL', lock, ':' .. attempt, hold.mode and ':' .. attempt or 'mode')
  redis.pcall('PEXPIRE', lock, hold.pttl)
end

-- Adds a hold; or if the attempt has one, this is a second delivery, or a poll that finds what a
-- release granted. Returns the answer to it if that fails.
local function add_hold(lock, queue, attempt, owner, token, hold, is_queued, call)
  local mode, reply = hold.mode, nil
  if not mode or token > 0 and token ~= hold.token then
    mode = string.format('reentrant %.0f', token)
  end
  if not hold.has_attempt then
    redis.call('HSET', lock, owner, hold.count + 1, ':' .. attempt, '1', 'mode', mode)
  elseif mode ~= hold.mode then
    redis.call('HSET', lock, 'mode', mode)
  end
  if hold.has_attempt or hold.pttl < call.ttl_ms + 0 then
    reply = redis.pcall('PEXPIRE', lock, math.max(hold.pttl, call.ttl_ms))
  end
  if is_queued and type(reply) ~= 'table' then
    reply = redis.pcall('ZREM', queue, entry_of(attempt, owner, call), 'seen ' .. attempt)
  end
  if type(reply) ~= 'table' then return nil end
  if not hold.has_attempt then
    undo_hold(lock, attempt, owner, hold)
  else
    redis.call('HSET', lock, 'mode', hold.mode) -- the proposal is undone, too
  end
  return reply
end

-- An admission of the node waits for the longest lease that it has granted.
local function note_lease(call)
  local node = call.admission
  if node and tonumber(call.ttl_ms) > tonumber(node[4] or 0) then
    redis.call('HSET', call.node, 'ttl', call.ttl_ms)
    node[4] = call.ttl_ms
  end
end

-- Acquires a lock that is free, or that the owner has: a nested hold has the token of the lock.
-- On a quorum, a second delivery of the only hold may propose a larger one, and so may each hold
-- if the nodes know different ones ("nested"). Returns the answer; and if that was a grant, the
-- state before it, unless the attempt had it.
local function acquire(lock, queue, fence, attempt, owner, queued_at, proposal, call)
  local refusal, hold, is_queued =
    refuse(lock, queue, attempt, owner, queued_at, proposal, call)
  if refusal then return refusal end
  local fields, token = {}, hold and hold.token > 0 and hold.token or nil
  local state, detail
  if not hold then
    state, detail = grant_next(lock, queue, fence, fields, attempt, call)
    if state == 'busy' or state == 'refused' then redis.call('DEL', lock) end -- a dead waiter's
    if state == 'refused' then return detail end
    if state ~= 'free' then
      local waiter = call.terms and entry_of(attempt, owner, call)
      if waiter then enqueue(queue, attempt, waiter, queued_at ~= '' and queued_at, nil, call) end
      return {detail, call.time}
    end
  end
  if proposal ~= '' and hold and not hold.may_propose then
    token = token or 0
  elseif proposal ~= '' then
    local current = token or 0
    token, refusal = accept(fence, proposal + 0, hold and hold.has_attempt, call)
    if token == 0 and hold then token = current end
  elseif not call.has_token then
    token = 0
  elseif not token then
    token, refusal = next_tokens(fence, call.minimum, call.count, call.token_ttl_ms)
  end
  if not token then
    if not hold then redis.call('DEL', lock) end -- a dead waiter's
    return refusal
  end
  note_lease(call)
  if hold then
    refusal = add_hold(lock, queue, attempt, owner, token, hold, is_queued, call)
    return refusal or token, not refusal and not hold.has_attempt and hold or nil
  end
  refusal = set_holder(lock, fields, attempt, owner, token, call.ttl_ms)
  if refusal then return refusal end
  -- Whatever words it was queued with: a place that stays would be granted to an ended attempt.
  local removed = detail and redis.pcall('ZREM', queue, detail, 'seen ' .. attempt)
  if type(removed) == 'table' then
    redis.call('DEL', lock)
    error(removed)
  end
  return token, false
end

-- The answer with which the attempt has ended, if that is marked; nil if not.
local function recall(queue, attempt, call)
  local mark = tonumber(redis.call('ZSCORE', queue, 'ended ' .. attempt))
  return mark and mark > 2^52 + call.time and (mark - 2^52) % 1000000 - 10 or nil
end

-- Writes down that the attempt has ended, with this answer. The score of the mark: 2^52, the second
-- until which it counts, in microseconds, and the answer plus 10.
local function record_end(queue, attempt, answer, call)
  -- A full server refuses ZADD as the first write of a script. ZREM comes first, of nothing: if it
  -- removed the last entry, the queue would be deleted and created again.
  redis.call('ZREM', queue, '')
  local mark = string.format('%.0f', 2^52 + call.time - call.time % 1000000 + 60000010 + answer)
  redis.call('ZADD', queue, mark, 'ended ' .. attempt)
  call.has_mark = true -- removed if this or what follows is refused
  redis.call('PEXPIRE', queue, '60000')
end

-- Releases one of several holds. Where only holds of Redisson are left, the hash is Redisson's
-- again: an owner and its count.
local function remove_hold(lock, attempt, owner)
  local is_redissons = redis.call('HLEN', lock) == 3
  redis.call('HDEL', lock, ':' .. attempt)
  local reply = redis.pcall('HINCRBY', lock, owner, '-1')
  if type(reply) == 'table' then
    redis.call('HSET', lock, ':' .. attempt, '1')
    error(reply)
  end
  if is_redissons then redis.call('HDEL', lock, 'mode') end
end

-- How many holds are revoked, or a refusal; and whether the lock is free then.
local function count_revoked(lock, revoke_from)
  local fields = unless_wrong_type(redis.pcall('HGETALL', lock))
  if not fields then return -2, false end
  if redis.call('PTTL', lock) == -1 then return -3, false end
  local count, ours, is_ours, holder = 0, 0, not fields[1], nil
  for at = 1, #fields, 2 do
    if fields[at] == 'mode' then
      is_ours = string.find(fields[at + 1], '^reentrant %d+$')
    elseif string.byte(fields[at]) == 58 then
      ours = ours + 1
    else
      count, holder = up_to(2^53 - 1, fields[at + 1]) or 2^53, fields[at]
    end
  end
  if not is_ours or count > ours then return -2, false end -- more: Redisson's, or spoilt
  if revoke_from ~= '' and holder ~= revoke_from then return 0, false end
  return count, true
end

-- When the last hold ends: the fields to remove, and which of them is a hold. Those of this owner
-- if there are no others; without an owner, all fields.
local function fields_of(lock, owner, attempt, call)
  local fields, hold = {owner, ':' .. attempt}, ':' .. attempt
  if not owner or redis.call('HLEN', lock) ~= 3 then
    fields, hold = {}, nil
    for at, text in ipairs(redis.call('HGETALL', lock)) do
      if at % 2 == 1 then fields[#fields + 1] = text end
      if at % 2 == 1 and string.byte(text) == 58 then hold = text end
    end
  end
  call.work = call.work + #fields -- count_revoked has read as many
  return fields, hold or fields[1]
end

-- The counter goes back to the last token that was used, or if none was, by all that were reserved,
-- unless it was raised since: it must not outrun the clock, from which a lost one is set anew. Of a
-- single token, nothing is given back: the attempt may have acquired the lock without one.
-- Returns by how much. If this is refused, as without a right, it stays where it is.
local function give_back(fence, last_token, call)
  local counter = redis.pcall('GET', fence)
  if type(counter) ~= 'string' or not string.find(counter, '^%d+$') then return 0 end
  local spare, most = counter - last_token, call.count - 1
  if last_token == '0' and most > 0 then spare, most = call.count, counter + 0 end
  if spare <= 0 or spare > most then return 0 end
  return type(redis.pcall('DECRBY', fence, spare)) == 'number' and spare or 0
end

-- Releases a hold; leaves the queue; or revokes all holds, from an owner or, with '', from any.
local function release(lock, queue, fence, attempt, owner, last_token, remembers, revoke_from, call)
  if not is_attempt(attempt) or not (is_owner(owner) or revoke_from and owner == '') then
    return -5
  end
  if last_token ~= '' and last_token ~= '0' and not up_to(2^53 - 1, last_token) then return -5 end
  if remembers then -- a second delivery gets the first answer, and changes nothing
    local recalled = recall(queue, attempt, call)
    if recalled then return recalled end
  end
  local answer, is_over, token, spare = 0, false, nil, 0
  if revoke_from then
    answer, is_over = count_revoked(lock, revoke_from)
  else
    local held = unless_wrong_type(redis.pcall('HMGET', lock, owner, ':' .. attempt, 'mode'))
    token = held and token_of(lock, held[3])
    if not held or not token and redis.call('EXISTS', lock) == 1 then
      answer = -2
    elseif held[1] and held[2] then
      answer = math.max(tonumber(held[1]) or 2, 1)
      is_over = answer == 1
    end
  end
  if remembers then record_end(queue, attempt, answer, call) end
  -- A server that refuses writes reports that only if there is something to remove.
  local waiter = call.terms and not revoke_from and entry_of(attempt, owner, call)
  if waiter and unless_wrong_type(redis.pcall('ZSCORE', queue, waiter)) then
    redis.call('ZREM', queue, waiter, 'seen ' .. attempt)
  end
  if not is_over then
    if answer > 0 then remove_hold(lock, attempt, owner) end
    return answer
  end
  local fields, hold = fields_of(lock, not revoke_from and owner, attempt, call)
  if call.keep_ms then redis.call('ZREM', queue, '') end -- see record_end
  if revoke_from then
    -- The token of the former holder is not the last one any more, as its client can find out.
    if answer > 0 and redis.call('EXISTS', fence) == 1 then redis.pcall('INCRBY', fence, '1') end
  elseif last_token ~= '' and (last_token ~= '0' or owner == attempt) then
    spare = give_back(fence, last_token, call)
  end
  local ok, state
  if call.keep_ms then
    state = set_holder(lock, fields, 'kept-' .. attempt, 'kept-' .. attempt, token, call.keep_ms)
    ok = not state
  else
    for _ = 1, 2 do
      local why
      ok, state, why = pcall(grant_next, lock, queue, fence, fields, attempt, call)
      if type(why) ~= 'table' or not string.find(why.err, 'OOM', 1, true) then break end
      redis.pcall('ZREM', queue, '') -- the next write is not the first one: see record_end
    end
    if ok and state ~= 'granted' then ok, state = pcall(redis.call, 'DEL', lock) end
  end
  -- A dead waiter may have the lock for its claim: then the former hold is over all the same.
  if not ok and redis.call('HEXISTS', lock, hold) == 1 then
    if spare > 0 then redis.pcall('INCRBY', fence, spare) end -- the hold may use them
    error(state)
  end
  return answer
end

-- A renewal that did not find its own hold, or was refused.
local function renew(lock, attempt, owner, call)
  if not is_attempt(attempt) or not is_owner(owner) then return -5 end
  local held = unless_wrong_type(redis.pcall('HMGET', lock, owner, ':' .. attempt, 'mode'))
  if not held then return -2 end
  if not token_of(lock, held[3]) then return redis.call('EXISTS', lock) == 1 and -2 or 0 end
  if not (held[1] and held[2]) then return 0 end
  local pttl, ttl = redis.call('PTTL', lock), call.ttl_ms + 0
  if pttl < ttl or call.successor then redis.call('PEXPIRE', lock, math.max(pttl, ttl)) end
  return call.time
end

-- Gives the hold to another attempt of its owner, and extends it. What still arrives of the former
-- one must not be granted anything: it has ended. A second delivery writes as well: a client that
-- waits for replicas counts what this connection has written.
local function adopt(lock, queue, attempt, owner, call)
  local successor = call.successor
  if not is_attempt(attempt) or not is_attempt(successor) or successor == attempt
    or not is_owner(owner) then
    return -5
  end
  if call.node and call.admission[1] ~= call.run then return -9 end
  if recall(queue, successor, call) then return -1 end
  local held = unless_wrong_type(redis.pcall('HMGET', lock, owner, ':' .. attempt, 'mode',
    ':' .. successor))
  if not (held and held[1] and held[2] and token_of(lock, held[3])) or held[4] then
    return renew(lock, successor, owner, call)
  end
  note_lease(call)
  redis.call('HDEL', lock, '') -- of nothing: without this right, both attempts would have the hold
  record_end(queue, attempt, 0, call)
  if redis.call('PTTL', lock) < call.ttl_ms + 0 then redis.call('PEXPIRE', lock, call.ttl_ms) end
  redis.call('HSET', lock, ':' .. successor, '1')
  redis.call('HDEL', lock, ':' .. attempt)
  return call.time
end

local function inspect(lock, queue, fence, call)
  local mode = unless_wrong_type(redis.pcall('HGET', lock, 'mode'))
  if mode == nil or not token_of(lock, mode) and redis.call('HLEN', lock) > 0 then
    return {-2, '0', 0, call.time}
  end
  local waiters = redis.pcall('ZCOUNT', queue, '-inf', '(4503599627370496') -- 2^52
  waiters = unless_wrong_type(waiters) or 0
  local token = unless_wrong_type(redis.pcall('GET', fence)) or '0'
  if not string.find(token, '^%d+$') or tonumber(token) >= 2^53 then token = '0' end
  local found, fields = {1, token, waiters, call.time}, redis.call('HGETALL', lock)
  for at = 1, #fields, 2 do
    if fields[at] ~= 'mode' and string.byte(fields[at]) ~= 58 then
      found[#found + 1] = fields[at]
      found[#found + 1] = up_to(2^53 - 1, fields[at + 1]) or 0
      found[#found + 1] = redis.call('PTTL', lock)
    end
  end
  call.work = call.work + #fields / 2
  return found
end

-- With `all`: what keeps a lock from being granted; nil if nothing does. Changes nothing.
local function find_obstacle(lock, queue, fence, attempt, owner, queued_at, proposal, call)
  local refusal, hold = refuse(lock, queue, attempt, owner, queued_at, proposal, call)
  if refusal then return refusal end
  local entries = hold and {} or redis.call('ZRANGE', queue, '0', '127', 'WITHSCORES')
  for at = 1, #entries, 2 do
    local place, waiter, kind, claim_ms = tonumber(entries[at + 1]), parse(entries[at])
    if place >= 2^52 or waiter == attempt then break end
    if kind == 'reentrant' and is_alive(queue, waiter, place, claim_ms, call.time) then
      return {claim_ms + 0, call.time}
    end
    -- Too many to check: another request removes those that are dead.
    if at == 255 then return {10, call.time} end
  end
  if proposal ~= '' then
    if hold and not hold.may_propose then return nil end
    local is_repair = call.purpose == 'repair'
    refusal = refuse_proposal(fence, proposal + 0, is_repair or hold and hold.has_attempt, call)
    return refusal and (refusal.err or not is_repair) and refusal or nil
  end
  local needs_token = call.has_token and (not hold or hold.token == 0)
  local counter = needs_token and redis.call('GET', fence) or '0'
  if not string.find(counter, '^%-?[1-9]%d*$') and counter ~= '0'
    or math.abs(tonumber(counter)) + call.count >= 2^53 then
    return {err = 'ERR the fencing counter is not a number below 2^53'}
  end
end

-- Removes marks that have expired, and of `size` random entries the dead waiters. If a quarter
-- of them was dead, it looks at more. Of the marks that releases leave, 19,000 are kept.
local function clean(queue, size, call)
  local last_mark = 2^52 + call.time - call.time % 1000000 + 61000000
  local are_many = redis.call('ZCOUNT', queue, 2^52, last_mark) > 20000
  local marks = redis.call('ZRANGEBYSCORE', queue, 2^52, are_many and last_mark or 2^52 + call.time,
    'LIMIT', 0, 800)
  if marks[1] then redis.call('ZREM', queue, unpack(marks)) end
  call.work = call.work + 4 + #marks / 4
  for _ = 1, 4 do
    local some, dead = redis.call('ZRANDMEMBER', queue, size, 'WITHSCORES'), {}
    for at = 1, #some, 2 do
      local entry, place = some[at], tonumber(some[at + 1])
      local waiter, _, claim_ms = parse(entry)
      if place < 2^52 and not (waiter and is_alive(queue, waiter, place, claim_ms, call.time)) then
        dead[#dead + 1] = entry
      end
    end
    if dead[1] then redis.call('ZREM', queue, unpack(dead)) end
    call.work = call.work + 1 + #some + #dead
    if #dead * 4 < size then return end
    size = 128
  end
end

if node and (verb == 'acquire' or successor) then
  local known = redis.call('HMGET', node, 'run', 'min_token', 'high', 'ttl')
  local numbers = (known[2] or '0') .. ' ' .. (known[3] or '0') .. ' ' .. (known[4] or '0')
  if not string.find(numbers, '^%d+ %d+ %d+$')
    or math.max(known[2] or 0, known[3] or 0, known[4] or 0) >= 2^53 then
    return {err = 'ERR the admission of the node is spoilt'}
  end
  call.admission = known
end

local is_blocked, seen, states, accepted = false, nil, nil, {}
if all == '1' then seen, states = {}, {} end
for i = 1, seen and n or 0 do
  local lock, queue, fence = KEYS[i], KEYS[n + i], KEYS[2 * n + i]
  answers[i] = seen[lock] and -5 or to_answer(pcall(find_obstacle, lock, queue, fence, ARGV[1 + i],
    ARGV[1 + n + i], ARGV[1 + 2 * n + i], ARGV[1 + 3 * n + i], call))
  is_blocked, seen[lock] = is_blocked or answers[i] ~= nil, true
end

local remembers, revoke_from = remember == '1' or force == '1', force == '1' and (only_from or '')
for order = 1, is_blocked and 0 or #left do
  local i = left[order]
  local lock, queue, fence = KEYS[i], KEYS[n + i], KEYS[2 * n + i]
  local attempt, owner = ARGV[1 + i], ARGV[1 + n + i]
  local ok, answer, before
  if order > 1 and call.work > 2000 and not seen then -- about 3 ms
    ok, answer = true, -10
  elseif verb == 'acquire' then
    ok, answer, before = pcall(acquire, lock, queue, fence, attempt, owner,
      ARGV[1 + 2 * n + i], ARGV[1 + 3 * n + i], call)
  elseif verb == 'release' then
    ok, answer = pcall(release, lock, queue, fence, attempt, owner, ARGV[1 + 2 * n + i],
      remembers, revoke_from, call)
  elseif successor then
    ok, answer = pcall(adopt, lock, queue, attempt, owner, call)
  elseif verb == 'renew' then
    ok, answer = pcall(renew, lock, attempt, owner, call)
  else
    ok, answer = pcall(inspect, lock, queue, fence, call)
  end
  if not ok and call.has_mark then redis.pcall('ZREM', queue, 'ended ' .. attempt) end
  if seen then states[i], accepted[i] = before, before ~= nil and call.accepted end
  answers[i] = to_answer(ok, answer)
  if call.accepted and type(answers[i]) ~= 'number' then -- nothing was granted
    redis.pcall('SET', fence, call.accepted, 'PX', token_ttl_ms)
  end
  call.work, call.accepted, call.has_mark = call.work + 7, nil, nil
end

-- With `all`, a refusal that could not be foreseen, as for a missing right, takes all back.
for i = 1, seen and n or 0 do
  is_blocked = is_blocked or type(answers[i]) ~= 'number' or answers[i] < 0
end
for i = 1, is_blocked and n or 0 do
  if states[i] then
    pcall(undo_hold, KEYS[i], ARGV[1 + i], ARGV[1 + n + i], states[i])
  elseif states[i] == false then
    redis.pcall('DEL', KEYS[i])
  end
  if accepted[i] then redis.pcall('SET', KEYS[2 * n + i], accepted[i], 'PX', token_ttl_ms) end
  if answers[i] == nil or type(answers[i]) == 'number' and answers[i] >= 0 then answers[i] = -10 end
end

-- One request in sixteen cleans its queue, by the clock: in a call, the lock of this number and
-- each sixteenth after it. An error here has no effect on a lock, so it is not answered.
local cleans = (claim or remembers or successor) and 16 - time % 16 or n + 1
for i = cleans, n, 16 do
  if call.work <= 2000 then pcall(clean, KEYS[n + i], 16, call) end
end
if n == 1 and type(answers[1]) == 'string' then return {err = answers[1]} end
return answers
