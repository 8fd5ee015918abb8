-- mutex/release: releases the mutex, or ends an attempt.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        as in acquire
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  remember       1: refuse the attempt and repeat this answer for a minute; default: no
-- ARGV[4]  claim_ms       as in acquire, to leave the queue; default: it is not queued
-- ARGV[5]  channel        as in acquire; default: it polls
-- ARGV[6]  token_ttl_ms   as in acquire; default: 3600000
--
-- Returns  1    released: granted to the next waiter, or free
--          0    the attempt held nothing
--          -2   refused: the key holds something else
--          -5   refused: an argument is malformed
--
-- A second delivery changes nothing; with remember, it gets the first answer.
local attempt, min_token, remember, claim_ms, channel, token_ttl_ms = unpack(ARGV)
local kind = 'mutex'
--@include check_release

-- The common case: no attempt waits, and there is nothing to remember.
local holder = redis.pcall('GET', KEYS[1])
local first
if holder == attempt and not remember and not claim then
  first = redis.pcall('ZRANGE', KEYS[3], '0', '0', 'WITHSCORES')
  if not first[1] then
    redis.call('DEL', KEYS[1])
    return 1
  end
end

--@include clock

--@include limit_min_token

--@include next_token

--@include waiter

--@include notify

--@include grant_mutex

--@include grant_next

if not first then
  --@include waiter_text

  --@include leave_queue

  --@include remember

  leave_queue(waiter_for('mutex', '', ''))
  if type(holder) == 'table' then return answer(-2) end
  if holder ~= attempt then return answer(0) end
  answer(1)
end
local _, is_granted = grant_next(first)
if not is_granted then redis.call('DEL', KEYS[1]) end
return 1
