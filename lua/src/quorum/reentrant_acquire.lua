-- quorum/reentrant_acquire.lua: take the lock on one node of a quorum, take it once more, or queue.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt": each hold; ":fence" -> token
-- KEYS[2]  fence     string: the largest accepted token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued; ttl one minute, refreshed
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     the holder; no white space, no ":" in front
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     "=N": the proposed token N; ">N": the same, also if the owner has a hold with
--                    an earlier one; "~N": repair, with the token N of the lease; N: the token
--                    must be larger; empty: no token
-- ARGV[5]  limit     how many holds the owner may have at most
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     ignored: one owner holds it
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond, the same on all nodes; absent: now
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: free in at most pttl ms; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a re-entrant lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          {-8, highest}  refused: the proposed token is not larger than this accepted one
--          -9             refused: the node was not admitted since it started or lost its data
--
-- A further hold of the same owner keeps the token, and the ttl becomes max(remaining, ttl_ms).
-- Delivered twice, it grants once, and the second answer carries the same token. It writes each
-- time, so that WAIT on the same connection waits for the grant.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(owner, '^[^%s:]%S*$')) then
  return -5
end

--@include proposal

--@include restart_guard

--@include next_token

--@include largest_accepted

--@include accept

--@include obstacle

--@include own_token

-- The common case: the lock is free, and nothing waits for it.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local blocked = obstacle()
  if blocked and not mends then return {-8, blocked} end
  local token = floor ~= '' and not blocked and own_token() or 0
  redis.call('HSET', KEYS[1], owner, 1, ':fence', string.format('%.0f', token), ':' .. attempt, 1)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
if waiter ~= '' and not string.match(waiter, '^%S+ [1-9]%d?%d?%d?%d? %S+ %S*$') then return -5 end
local holds = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, ':fence')
if holds.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end
if holds[1] then
  local count = tonumber(holds[1])
  if not count then return -2 end
  if not holds[2] then
    if count >= tonumber(ARGV[5]) then return -4 end
    if string.byte(floor) == 62 and obstacle() then return {-8, obstacle()} end
    redis.call('HSET', KEYS[1], owner, count + 1, ':' .. attempt, 1)
  end
  if proposed and (count == 1 and holds[2] or string.byte(floor) == 62) then -- ">"
    if obstacle(true) then return {-8, obstacle(true)} end
    holds[3] = accept(proposed)
    redis.call('HSET', KEYS[1], ':fence', string.format('%.0f', proposed))
  end
  if holds[2] or pttl < ttl_ms then redis.call('PEXPIRE', KEYS[1], math.max(pttl, ttl_ms)) end
  if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
  return tonumber(holds[3] or 0)
end

--@include clock
local queued_at = tonumber(ARGV[9]) or time

--@include queue

if pttl >= 0 then
  queue(queued_at)
  return {pttl, time}
end

--@include grant_reentrant

--@include hand_over_or_accept
