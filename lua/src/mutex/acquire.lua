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
--@include plain_floor

--@include next_token

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
--@include clock

--@include queue

if holder then
  queue(time)
  return {pttl, time}
end

--@include grant_mutex

--@include hand_over_or_grant
