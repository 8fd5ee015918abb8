-- mutex/release.lua: give the mutex up, or end an attempt whose outcome nobody waits for.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
-- KEYS[4]  ended     string: the answer with which this attempt was ended; absent if ended_ms is 0
-- ARGV[1]  owner     ignored: the one holder of a mutex is the attempt
-- ARGV[2]  attempt   as in acquire
-- ARGV[3]  ended_ms  0, or for how long to remember this answer and to refuse the attempt
-- ARGV[4]  floor     a token that is handed over must be larger than this
-- ARGV[5]  waiter    as in acquire, to leave the queue; absent or empty: it is not queued
--
-- Returns  1     released: handed to the next waiter, or free
--          0     it held nothing
--          -2    the key holds something that is not a mutex
--
-- Delivered twice, it releases once. Where the outcome of an acquire or of a release may stay unknown,
-- send ended_ms: the second answer is then the first one, and a late acquire is refused.
local attempt, ended_ms, floor, waiter = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] or ''

-- The common case: nobody waits, and there is nothing to remember.
if ended_ms == 0 and redis.call('EXISTS', KEYS[3]) == 0 and redis.pcall('GET', KEYS[1]) == attempt then
  redis.call('DEL', KEYS[1])
  return 1
end

-- A counter above a floor: INCR is enough until the counter is lost or the clock has passed it.
local function next_token()
  local token = redis.call('INCR', KEYS[2])
  local least = tonumber(floor) or 0
  if token == 1 or token <= least then
    local now = redis.call('TIME')
    token = math.max(least + 1, now[1] * 1000000 + now[2])
    redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', 86400000)
  end
  if token > 9007199254740991 then
    redis.call('DECR', KEYS[2])
    error('the fencing counter is at 2^53')
  end
  return token
end

local function grant(_, to, until_ms)
  redis.call('SET', KEYS[1], to, 'PXAT', string.format('%.0f', until_ms))
end

-- Not passed on to replicas: who listens to one is not counted, and must not hear that he has what goes to the next.
local function publish(channel, message)
  redis.set_repl(redis.REPL_NONE)
  local heard = redis.pcall('PUBLISH', channel, message)
  redis.set_repl(redis.REPL_ALL)
  return heard
end

-- Grants the free lock to the first waiter who can be told, for a claim that ends at a time of the same
-- clock that the message dates it by. Nil and a token if there is none.
-- PUBLISH answers how many heard it: 0 is a client that is gone, unless its channel ends in "~": then it listens to
-- another node of a cluster. An error is a denied channel.
local function hand_over()
  if redis.call('EXISTS', KEYS[3]) == 0 then return nil end
  local minted, token = pcall(next_token)
  if not minted then return nil end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  local news = string.format(' %.0f %.0f ', token, time) .. KEYS[1]
  for _ = 1, 64 do
    local waiting = redis.pcall('ZPOPMIN', KEYS[3])[1]
    if not waiting or waiting == waiter then return nil, token end
    local heir, claim_ms, its_owner, channel = string.match(waiting, '^(%S+) (%d%d?%d?%d?%d?) (%S+) ?(.*)$')
    claim_ms = tonumber(claim_ms) or 0
    if claim_ms > 0 then
      grant(its_owner, heir, math.floor(time / 1000) + claim_ms, token)
      if channel == '' or publish(channel, heir .. news) ~= 0 or string.sub(channel, -1) == '~' then
        return claim_ms
      end
    end
  end
  return nil, token
end

-- False also if the key holds something else. Only asked, so that a server that refuses to write says so when it is
-- to write.
local function is_queued()
  return type(redis.pcall('ZSCORE', KEYS[3], waiter)) == 'string'
end

-- Once per attempt: a second delivery gets the first answer, and changes nothing.
-- DEL comes first, since a full server refuses SET as the first write of a script, and must not keep a lock.
local function once(answer)
  if ended_ms > 0 then
    redis.call('DEL', KEYS[4])
    redis.call('SET', KEYS[4], answer, 'PX', ended_ms)
  end
  return answer
end

if ended_ms > 0 then
  local before = redis.call('GET', KEYS[4])
  if before then return tonumber(before) or 0 end
end
if waiter ~= '' and is_queued() then redis.call('ZREM', KEYS[3], waiter) end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return once(-2) end
if holder ~= attempt then return once(0) end
local answer = once(1)
if not hand_over() then redis.call('DEL', KEYS[1]) end
return answer
