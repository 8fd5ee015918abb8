-- reentrant/release.lua: give one hold up, or end an attempt whose outcome nobody waits for.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt" for each hold; ":fence" -> its token
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
-- KEYS[4]  ended     string: the answer with which this attempt was ended; absent if ended_ms is 0
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire: which hold to give up
-- ARGV[3]  ended_ms  0, or for how long to remember this answer and to refuse the attempt
-- ARGV[4]  floor     a token that is handed over must be larger than this
-- ARGV[5]  waiter    as in acquire, to leave the queue; absent or empty: it is not queued
--
-- Returns  1     released, the last hold of its owner: handed to the next waiter, or free
--          1+n   released; the owner has n holds left
--          0     it held nothing
--          -2    the key holds something that is not a re-entrant lock
--
-- The ttl stays as it is while holds are left. Delivered twice, it releases once. Where the outcome of an
-- acquire or of a release may stay unknown, send ended_ms: the second answer is then the first one, and a
-- late acquire is refused.
local owner, attempt, ended_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] or ''

-- The common cases: one of several holds, or the last one while nobody waits, and nothing to remember.
if ended_ms == 0 and waiter == '' then
  local holds = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt)
  local count = holds[2] and tonumber(holds[1]) or 0
  if count > 1 then
    redis.call('HDEL', KEYS[1], ':' .. attempt)
    return 1 + redis.call('HINCRBY', KEYS[1], owner, -1)
  elseif count == 1 and redis.call('EXISTS', KEYS[3]) == 0 then
    redis.call('DEL', KEYS[1])
    return 1
  end
end

--@include next_token

--@include grant_reentrant

--@include grant_next

--@include is_queued

--@include record_answer

--@include recorded_answer
if waiter ~= '' and is_queued() then redis.call('ZREM', KEYS[3], waiter) end
local count = redis.pcall('HGET', KEYS[1], owner)
if type(count) == 'table' or (count and not tonumber(count)) then return once(-2) end
if not count or redis.call('HDEL', KEYS[1], ':' .. attempt) == 0 then return once(0) end
count = redis.call('HINCRBY', KEYS[1], owner, -1)
local answer = once(1 + math.max(count, 0))
if count <= 0 and not hand_over() then redis.call('DEL', KEYS[1]) end
return answer
