-- reentrant/release: generated from its source in lua/src, do not edit.
-- reentrant/release: releases one hold, or ends an attempt.
--
-- KEYS[1]  lock           hash: the owner and its count, `mode`, and `:<attempt>` for each hold
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        as in acquire
-- ARGV[2]  owner          as in acquire
-- ARGV[3]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[4]  remember       1: refuse the attempt and repeat this answer for a minute; default: no
-- ARGV[5]  claim_ms       as in acquire, to leave the queue; default: it is not queued
-- ARGV[6]  channel        as in acquire; default: it polls
-- ARGV[7]  max_depth      as in acquire; default: 255
-- ARGV[8]  token_ttl_ms   as in acquire; default: 3600000
--
-- Returns  1     released, the last hold of its owner: granted to the next waiter, or free
--          1+n   released; the owner has n holds left
--          0     the attempt held nothing
--          -2    refused: the key holds something else
--          -5    refused: an argument is malformed
--
-- The TTL stays as it is while holds are left. A second delivery changes nothing; with remember, it
-- gets the first answer.
local attempt, owner, min_token, remember, claim_ms, channel, max_depth, token_ttl_ms = unpack(ARGV)
local kind = 'reentrant'
-- Every argument is checked on every path, before the first write.
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
local minimum = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (string.find(min_token, '^%d+$') and minimum < 2^52) then return -5 end
local claim
if claim_ms and claim_ms ~= '' then
  claim = #claim_ms <= 5 and string.find(claim_ms, '^[1-9]%d*$') and tonumber(claim_ms)
  if not claim or claim > 60000 then return -5 end
end
if channel and channel ~= '' then
  -- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
  -- no other one: a release publishes with the rights of its own user, for whatever was queued.
  local function is_channel(text)
    return #text >= 37 and string.find(text, '^wake:%x+$', -37)
      or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
  end
  if not is_channel(channel) or #channel > 256 or string.find(channel, ' ', 1, true) then return -5 end
end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
if remember == '' then remember = nil end
if remember and remember ~= '1' then return -5 end
-- `mode` is a field of the hash that says its kind.
if not owner or owner == '' or owner == 'mode' or #owner > 256 or string.byte(owner) == 58
  or string.find(owner, ' ', 1, true) then
  return -5
end
local depth = 255
if max_depth and max_depth ~= '' then
  depth = #max_depth <= 4 and string.find(max_depth, '^[1-9]%d*$') and tonumber(max_depth)
  if not depth or depth > 1024 then return -5 end
end

-- Where only holds of Redisson are left, the hash is Redisson's again: an owner and its count.
local function leave_to_redisson()
  if redis.call('HLEN', KEYS[1]) == 2 then redis.call('HDEL', KEYS[1], 'mode') end
end

-- The common cases: one of several holds, or the last one while no attempt waits, and nothing
-- to remember.
local held, first
if not remember and not claim then
  held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
  local count = held[2] and tonumber(held[1]) or 0
  if count > 1 then
    redis.call('HDEL', KEYS[1], ':' .. attempt)
    redis.call('HINCRBY', KEYS[1], owner, -1)
    leave_to_redisson()
    return count
  elseif count == 1 then
    first = redis.pcall('ZRANGE', KEYS[3], '0', '0', 'WITHSCORES')
    if not first[1] then
      redis.call('DEL', KEYS[1])
      return 1
    end
  end
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]

-- A mistake of another client must not keep a lock from being released.
if minimum and minimum > time + 86400000000 then minimum = nil end

-- A counter above min_token: INCR suffices until the counter is lost or the clock has passed it.
-- Nil and a refusal if the counter is spoilt, or min_token is more than a day ahead of the clock.
local function next_token()
  local token = redis.pcall('INCR', KEYS[2])
  if type(token) == 'table' then return nil, token end
  if token > 1 and token > (minimum or 0) and token < 2^53 then return token end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  if token >= 2^53 or (minimum or 0) > time + 86400000000 then
    if token == 1 then redis.call('DEL', KEYS[2]) else redis.call('DECR', KEYS[2]) end
    return nil, token >= 2^53 and redis.error_reply('ERR the fencing counter is at 2^53') or -5
  end
  token = math.max((minimum or 0) + 1, time)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end

-- The token of a re-entrant lock, 0 if it has none; nil if the hash is something else. A Redisson
-- RLock is one field `<UUID>:<thread>` -> count.
local function reentrant_token(mode)
  if mode then return to_token(string.match(mode, '^reentrant (%d+)$')) end
  local field = redis.call('HLEN', KEYS[1]) == 1 and redis.call('HRANDFIELD', KEYS[1])
  local is_redisson = field and string.find(field, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    and tonumber(redis.call('HGET', KEYS[1], field))
  return is_redisson and 0 or nil
end

-- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
-- no other one: a release publishes with the rights of its own user, for whatever was queued.
local function is_channel(text)
  return #text >= 37 and string.find(text, '^wake:%x+$', -37)
    or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
end

-- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol. A
-- claim of 20 digits, or one that begins with 0, would make the grant fail after the release has
-- written its answer. The claim stays a text, since the server formats each number that it gets.
local function parse(entry)
  local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth =
    string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]*) ?(%d*)$')
  if not ms or tonumber(ms) > 60000 then return nil end
  if waiter_channel ~= '' and not is_channel(waiter_channel) then return nil end -- written by hand
  return waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark.
local function is_alive(waiter_attempt, waiter_place, ms)
  if waiter_place < 0 then waiter_place = waiter_place + 2^52 end
  -- A waiter also counts as alive if the clock was set back a little.
  if math.abs(time - waiter_place) < ms * 1000 then return true end
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. waiter_attempt)) or 0) > 2^52 + 61000000 + time
end

-- `attempt,attempt token time lock`: which attempts were granted the lock, with which token, at
-- which microsecond.
local function message(attempts, granted_token)
  return attempts .. string.format(' %.0f ', granted_token)
    .. clock[1] .. string.format('%06d ', clock[2]) .. KEYS[1]
end

-- False: the channel has no subscriber, so the waiter is dead. Where a channel ends in "~", the
-- waiter may listen to another node of a cluster, which PUBLISH does not count.
--
-- An error is a channel that this user may not publish to. The message is not replicated:
-- subscribers of a replica are not in our count, and must not be notified of a lock that is granted
-- to the next waiter.
local function notify(waiter_channel, text)
  if waiter_channel == '' then return true end
  redis.set_repl(redis.REPL_NONE)
  local receivers = redis.pcall('PUBLISH', waiter_channel, text)
  redis.set_repl(redis.REPL_ALL)
  return receivers ~= 0 or string.sub(waiter_channel, -1) == '~'
end

local function grant(waiter_attempt, waiter_owner, granted_token, ms)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'mode', string.format('reentrant %.0f', granted_token), waiter_owner, '1',
    ':' .. waiter_attempt, '1')
  redis.call('PEXPIRE', KEYS[1], ms)
end

-- Grants the free lock to the waiter of this kind that has waited longest and is alive, for its
-- claim: that ends at a time of the clock that the message is dated by. Waiters of other kinds keep
-- their places, dead ones lose theirs. Returns for how long the lock is busy now, and whether it
-- was granted; nothing if there is no such waiter before this attempt.
--
-- Of a long queue of dead waiters, each call removes some; the lock is busy until all are removed,
-- so that nothing overtakes.
--
-- If there is no token for the waiter, it returns nil, false and a refusal: a release still frees
-- the lock, but no other attempt may be granted it before the waiter.
--
-- A caller that has read the `first` entry of the queue, with its place, passes it.
local new_token
local function grant_next(first)
  local others = 0
  for _ = 1, 128 do
    first = first or redis.pcall('ZRANGE', KEYS[3], others, others, 'WITHSCORES')
    local entry, waiter_place = first[1], tonumber(first[2])
    first = nil
    if not waiter_place or waiter_place >= 2^52 then return nil end
    local next_attempt, waiter_kind, ms, waiter_channel, waiter_owner = parse(entry)
    if next_attempt == attempt then return nil end
    local alive = next_attempt and is_alive(next_attempt, waiter_place, ms)
    if alive and waiter_kind ~= kind then
      others = others + 1
    else
      if alive and not new_token then
        local refusal
        new_token, refusal = next_token()
        if not new_token then return nil, false, refusal end
      end
      redis.call('ZREM', KEYS[3], entry, 'seen ' .. (next_attempt or ''))
      if alive and notify(waiter_channel, message(next_attempt, new_token)) then
        grant(next_attempt, waiter_owner, new_token, ms)
        return tonumber(ms), true
      end
    end
  end
  return 10, false
end

-- The only hold of a lock for which attempts wait needs no count.
if not first or not reentrant_token(held[3]) then
  -- The text by which an attempt is queued.
  local function waiter_for(waiter_kind, waiter_owner, waiter_depth)
    if not claim then return '' end
    return attempt .. ' ' .. waiter_kind .. ' ' .. claim_ms .. ' ' .. (channel or '') .. ' '
      .. waiter_owner .. waiter_depth
  end

  -- The attempt is removed only if it is queued: a server that refuses writes then reports that
  -- only if there is something to write.
  local function leave_queue(waiter)
    if not claim or type(redis.pcall('ZSCORE', KEYS[3], waiter)) ~= 'string' then return false end
    redis.call('ZREM', KEYS[3], waiter, 'seen ' .. attempt)
    return true
  end

  -- A second delivery gets the first answer for a minute, and changes nothing. The mark is the
  -- second until which it counts, in microseconds; its last six digits are the answer plus 10. ZREM
  -- comes first, since a full server refuses ZADD as the first write of a script, and must not keep
  -- a lock.
  local function answer(number)
    if remember then
      redis.call('ZREM', KEYS[3], 'ended ' .. attempt)
      redis.call('ZADD', KEYS[3], 2^52 + (clock[1] + 60) * 1000000 + number + 10, 'ended ' .. attempt)
      redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
      -- In a cluster every release leaves a mark. Above 20,000, each one removes the 100 oldest.
      local last = 2^52 + (clock[1] + 61) * 1000000
      if redis.call('ZCOUNT', KEYS[3], 2^52, last) > 20000 then
        redis.call('ZREM', KEYS[3], unpack(redis.call('ZRANGEBYSCORE', KEYS[3], 2^52, last, 'LIMIT', 0, 100)))
      end
      if redis.call('PTTL', KEYS[3]) < 60000 then redis.call('PEXPIRE', KEYS[3], 60000) end
    end
    return number
  end

  if remember then
    local mark = tonumber(redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt))
    if mark and mark > 2^52 + time then return (mark - 2^52) % 1000000 - 10 end
  end

  leave_queue(waiter_for('reentrant', owner, ' ' .. depth))
  held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
  if held.err then return answer(-2) end
  if redis.call('EXISTS', KEYS[1]) == 1 and not reentrant_token(held[3]) then return answer(-2) end
  if not held[1] or not held[2] then return answer(0) end
  redis.call('HDEL', KEYS[1], ':' .. attempt)
  local count = math.max(redis.call('HINCRBY', KEYS[1], owner, -1), 0)
  answer(1 + count)
  if count > 0 then
    leave_to_redisson()
    return 1 + count
  end
end
local _, is_granted = grant_next(first)
if not is_granted then redis.call('DEL', KEYS[1]) end
return 1
