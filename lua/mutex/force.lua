-- mutex/force: generated from lua/src/mutex/force.lua, do not edit.
-- mutex/force: takes the mutex away from its holder.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every call, the same in each delivery
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  token_ttl_ms   as in acquire; default: 3600000
--
-- Returns  1    taken away: granted to the next waiter, or free
--          0    it was free
--          -2   refused: the key holds something else
--          -3   refused: the key has no TTL
--          -5   refused: an argument is malformed
--
-- The former holder learns of it from its next renewal or release. A second delivery within a
-- minute gets the first answer, and takes nothing away from the next holder.
local attempt, min_token, token_ttl_ms = unpack(ARGV)
local kind, remember = 'mutex', '1'
-- Every argument is checked on every path, before the first write.
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
local least = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (least and least >= 0 and least < 2^52 and least % 1 == 0) then return -5 end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)

if least and least > time + 86400000000 then return -5 end

-- A counter above min_token: INCR is enough until the counter is lost or the clock has passed it.
-- Nil and a refusal if the counter is spoilt, or min_token is more than a day ahead of the clock.
local function next_token()
  local token = redis.pcall('INCR', KEYS[2])
  if type(token) == 'table' then return nil, token end
  if token > 1 and token > (least or 0) and token < 2^53 then return token end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  if token >= 2^53 or (least or 0) > time + 86400000000 then
    if token == 1 then redis.call('DEL', KEYS[2]) else redis.call('DECR', KEYS[2]) end
    return nil, token >= 2^53 and redis.error_reply('ERR the fencing counter is at 2^53') or -5
  end
  token = math.max((least or 0) + 1, time)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

-- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol.
local function parse(entry)
  local its_attempt, its_kind, ms, its_channel, its_owner, its_depth =
    string.match(entry, '^([^ ]+) (%l+) (%d+) ([^ ]*) ([^ ]*) ?(%d*)$')
  if not its_attempt then return nil end
  if its_channel ~= '' then -- an entry may have been written by hand
    local word = string.find(its_channel, 'wake:', -38, true)
    if not word or not string.find(its_channel, '^%x+~?$', word + 5) then return nil end
  end
  return its_attempt, its_kind, tonumber(ms), its_channel, its_owner, its_depth
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark.
local function is_alive(its_attempt, its_place, ms)
  if its_place < 0 then its_place = its_place + 2^52 end
  if math.abs(time - its_place) < ms * 1000 then return true end -- also if the clock was set back a little
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. its_attempt)) or 0) > 2^52 + time
end

-- `attempt,attempt token time lock`: to whom the lock was granted, with which token, at which
-- microsecond.
local function message(attempts, its_token)
  return attempts .. string.format(' %.0f ', its_token)
    .. clock[1] .. string.format('%06d ', clock[2]) .. KEYS[1]
end

-- False: nobody listens to the channel, so the waiter is gone. Where a channel ends in "~", the
-- waiter may listen to another node of a cluster, which PUBLISH does not count. An error is a
-- channel that this user may not publish to. The message is not replicated: subscribers of a
-- replica are not in our count, and must not be told that they own a lock that goes to the next
-- waiter.
local function notify(its_channel, text)
  if its_channel == '' then return true end
  redis.set_repl(redis.REPL_NONE)
  local heard = redis.pcall('PUBLISH', its_channel, text)
  redis.set_repl(redis.REPL_ALL)
  return heard ~= 0 or string.sub(its_channel, -1) == '~'
end

local function grant(its_attempt, _, _, ms)
  redis.call('SET', KEYS[1], its_attempt, 'PX', ms)
end

-- Grants the free lock to the waiter of this kind that has waited longest and is alive, for its
-- claim: that ends at a time of the clock that the message is dated by. Returns the claim; nothing
-- if there is no such waiter before this attempt. Waiters of other kinds keep their places, dead
-- ones lose theirs.
local minted
local function grant_next()
  local others = 0
  for _ = 1, 256 do
    local first = redis.pcall('ZRANGE', KEYS[3], others, others, 'WITHSCORES')
    local entry, its_place = first[1], tonumber(first[2])
    if not its_place or its_place >= 2^52 then return nil end
    local heir, its_kind, ms, its_channel, its_owner = parse(entry)
    if heir == attempt then return nil end
    local lives = heir and is_alive(heir, its_place, ms)
    if lives and its_kind ~= kind then
      others = others + 1
    else
      if lives then minted = minted or next_token() end
      if lives and not minted then return nil end
      -- It has a mark once it has polled, which takes some milliseconds.
      if heir and its_place + 5000 < time then redis.call('ZREM', KEYS[3], 'seen ' .. heir) end
      redis.call('ZREM', KEYS[3], entry)
      if lives and notify(its_channel, message(heir, minted)) then
        grant(heir, its_owner, minted, ms)
        return ms
      end
    end
  end
end

-- A second delivery gets the first answer for a minute, and changes nothing. The mark is the
-- microsecond until which it counts; its last six digits are the answer. ZREM comes first, since a
-- full server refuses ZADD as the first write of a script, and must not keep a lock.
local function answer(number)
  if remember then
    redis.call('ZREM', KEYS[3], 'ended ' .. attempt)
    redis.call('ZADD', KEYS[3], 2^52 + (clock[1] + 60) * 1000000 + number + 10, 'ended ' .. attempt)
    redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
    -- In a cluster every release leaves a mark: beyond so many, the oldest go.
    if redis.call('ZCOUNT', KEYS[3], 2^52, '+inf') > 20000 then
      -- The marks of living waiters expire sooner, and stay.
      local oldest = redis.call('ZRANGEBYSCORE', KEYS[3], 2^52 + time + 3000000, '+inf', 'LIMIT', 0, 100)
      for _, mark in ipairs(oldest) do
        if string.sub(mark, 1, 6) == 'ended ' then redis.call('ZREM', KEYS[3], mark) end
      end
    end
    if redis.call('PTTL', KEYS[3]) < 60000 then redis.call('PEXPIRE', KEYS[3], 60000) end
  end
  return number
end

if remember then
  local mark = tonumber(redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt))
  if mark and mark > 2^52 + time then return (mark - 2^52) % 1000000 - 10 end
end

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return answer(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return answer(-3) end
local number = answer(holder and 1 or 0)
if not grant_next() then redis.call('DEL', KEYS[1]) end
return number
