-- reentrant/acquire.lua: take the lock, take it once more, or queue for it.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt" for each hold; ":fence" -> its token
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued; ttl one minute, refreshed by waiters
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     who holds; no white space, no ":" in front
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     the token must be larger than this; of a quorum "=N": it is N, "~N": N once more,
--                    ">N": N, also if the owner has a hold with an earlier one; empty: none
-- ARGV[5]  limit     how many holds the owner may have at most
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent or empty: do not queue
-- ARGV[7]  crowd     ignored: one owner holds it
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond that is the same on all nodes of a quorum; absent: now
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: free in at most pttl ms; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a re-entrant lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          {-8, highest}  refused: a token is proposed that is not larger than the largest accepted before
--          -9             refused: this node of a guarded quorum was not admitted since it started or lost its data
--
-- A further hold of the same owner keeps the token, and the ttl becomes max(remaining, ttl_ms).
-- Delivered twice, it grants once, and the second answer carries the same token. It writes each time, so that WAIT on
-- the same connection waits for the grant.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(owner, '^[^%s:]%S*$')) then
  return -5
end

--@include proposal

--@include restart_guard

--@include next_token

-- The common case: nobody is there. On one server, the token is the next one.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])
if keys == 0 and not proposed then
  local token = floor ~= '' and next_token() or 0
  redis.call('HSET', KEYS[1], owner, 1, ':fence', string.format('%.0f', token), ':' .. attempt, 1)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include largest_accepted

--@include accept

--@include obstacle

--@include own_token

if keys == 0 then
  local blocked = obstacle()
  if blocked and not mends then return {-8, blocked} end
  local token = blocked and 0 or accept(proposed)
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

local now = redis.call('TIME')
local time = now[1] * 1000000 + now[2]
--@include queue
if pttl >= 0 then
  queue()
  return {pttl, time}
end

--@include grant_reentrant

--@include publish

--@include grant_next

-- Free, but others queued first: theirs, if one of them can be told.
if obstacle() and not mends then return {-8, obstacle()} end
local claimed, token = hand_over()
if claimed then
  queue()
  return {claimed, time}
end
local blocked = obstacle(true)
if blocked and not mends then
  redis.call('DEL', KEYS[1]) -- from one who was not there to be told
  return {-8, blocked}
end
token = floor ~= '' and not blocked and (not proposed and token or own_token()) or 0
if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
grant(owner, attempt, math.floor(time / 1000) + ttl_ms, token)
return token
