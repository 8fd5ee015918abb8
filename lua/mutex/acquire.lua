-- mutex/acquire.lua: take the mutex, or queue for it.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex; always with a ttl
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued; ttl one minute, refreshed
-- KEYS[4]  ended     string: exists once this attempt was ended
-- ARGV[1]  owner     ignored: the one holder of a mutex is the attempt
-- ARGV[2]  attempt   fresh for every lease, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     the token must be larger than this number; empty: no token
-- ARGV[5]  limit     ignored: a mutex has one hold
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     ignored: a mutex has one holder
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: free in at most pttl ms; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a mutex
--          -3             refused: the key holds something without a ttl
--          -5             refused: an argument is not what it must be
--
-- Delivered twice, it grants once, and the second answer carries the same token.
local attempt, ttl_ms, floor, waiter = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
local owner = attempt -- the one holder of a mutex
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0) then return -5 end
-- A proposed token belongs to the scripts for quorums.
if (string.byte(floor) or 0) > 57 then return -5 end

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

-- The common case: the mutex is free, and nothing waits for it.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local token = floor ~= '' and next_token() or 0
  redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
  return token
end

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
if waiter ~= '' and not string.match(waiter, '^%S+ [1-9]%d?%d?%d?%d? %S+ %S*$') then return -5 end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
if holder == attempt then -- a second delivery, or a poll that finds what a release handed over
  local token = floor ~= '' and tonumber(redis.call('GET', KEYS[2]) or next_token()) or 0
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function queue(queued_at)
  if waiter == '' then return end
  redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', queued_at), waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
end

if holder then
  queue(time)
  return {pttl, time}
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

-- Free, but others queued first: theirs, if one of them can be notified.
local claimed, token = hand_over()
if claimed then
  queue(time)
  return {claimed, time}
end
token = floor ~= '' and (token or next_token()) or 0
if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
grant(owner, attempt, now + ttl_ms, token)
return token
