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

--@include next_token

--@include grant_mutex

--@include grant_next

--@include is_queued

--@include record_answer

--@include recorded_answer
if waiter ~= '' and is_queued() then redis.call('ZREM', KEYS[3], waiter) end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return once(-2) end
if holder ~= attempt then return once(0) end
local answer = once(1)
if not hand_over() then redis.call('DEL', KEYS[1]) end
return answer
