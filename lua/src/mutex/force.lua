-- mutex/force.lua: take the mutex away from whoever holds it.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
-- KEYS[4]  ended     string: the answer with which this request was ended
-- ARGV[1]  owner     ignored
-- ARGV[2]  attempt   fresh for every request, the same in every delivery; ignored beside KEYS[4]
-- ARGV[3]  ended_ms  for how long to remember this answer
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  1     taken away: handed to the next waiter, or free
--          0     nobody held it
--          -2    the key holds something that is not a mutex; nothing is changed
--          -3    the key holds something without a ttl; nothing is changed
--
-- The former holder learns of it from its next renewal or its release. Delivered twice, it takes the
-- mutex away once: the heir of the first delivery keeps it.
local ended_ms, floor, waiter = tonumber(ARGV[3]), ARGV[4], ''

--@include next_token

--@include grant_mutex

--@include grant_next

--@include record_answer

--@include recorded_answer
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return once(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return once(-3) end
local answer = holder and once(1) or once(0)
if not hand_over() then redis.call('DEL', KEYS[1]) end
return answer
