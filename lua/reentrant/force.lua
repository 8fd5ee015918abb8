-- reentrant/force: generated from its source in lua/src, do not edit.
-- reentrant/force: revokes the lock of its holder.
--
-- KEYS[1]  lock           hash: the owner and its count, `mode`, and `:<attempt>` for each hold
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every call, the same in each delivery
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  token_ttl_ms   as in acquire; default: 3600000
-- ARGV[4]  only_from      an owner: revoke the lock from this one only; default: from any
--
-- Returns  n    revoked, with all n holds of its owner: granted to the next waiter, or free
--          0    it was free, or another owner's
--          -2   refused: the key holds something else, or Redisson has a hold
--          -3   refused: the key has no TTL
--          -5   refused: an argument is malformed
--
-- The former holder learns of it from its next renewal or release. A second delivery within a
-- minute gets the first answer, and revokes nothing of the next holder.
local attempt, min_token, token_ttl_ms, only_from = unpack(ARGV)
local kind, remember = 'reentrant', '1'
-- Every argument is checked on every path, before the first write.
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
local minimum = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (string.find(min_token, '^%d+$') and minimum < 2^52) then return -5 end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
if only_from == '' then only_from = nil end
if only_from and (#only_from > 256 or string.byte(only_from) == 58 or string.find(only_from, ' ', 1, true)) then
  return -5
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

local fields = redis.pcall('HGETALL', KEYS[1])
if fields.err then return answer(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return answer(-3) end
local count, ours, is_ours, holder = 0, 0, false, nil
for i = 1, #fields, 2 do
  if fields[i] == 'mode' then
    is_ours = string.find(fields[i + 1], '^reentrant %d+$')
  elseif string.sub(fields[i], 1, 1) == ':' then
    ours = ours + 1
  else
    count, holder = tonumber(fields[i + 1]) or 0, fields[i]
  end
end
if fields[1] and not is_ours or count > ours then return answer(-2) end
if only_from and holder ~= only_from then return answer(0) end
local number = answer(count)
-- The token of the former holder is not the last one any more, as its client can find out.
if number > 0 and redis.call('EXISTS', KEYS[2]) == 1 then redis.pcall('INCR', KEYS[2]) end
local _, is_granted = grant_next()
if not is_granted then redis.call('DEL', KEYS[1]) end
return number
