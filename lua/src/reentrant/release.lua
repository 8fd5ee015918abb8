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
--@include check_release
--@include check_owner
--@include check_depth

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

--@include clock

--@include limit_min_token

--@include next_token

--@include to_token

--@include reentrant_token

--@include waiter

--@include notify

--@include grant_reentrant

--@include grant_next

-- The only hold of a lock for which attempts wait needs no count.
if not first or not reentrant_token(held[3]) then
  --@include waiter_text

  --@include leave_queue

  --@include remember

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
