-- mutex/inspect.lua: who holds the mutex, for how long, and how many wait. Writes nothing.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
--
-- Returns  { 1, fence, waiters, time}    then for each holder: owner, count, pttl
--          {-2, 0, 0, time}              the key holds something that is not a mutex
--
-- fence is the last token granted, as a string, or '0'. A pttl of -1 is a key without a ttl.
local now = redis.call('TIME')
local time = now[1] * 1000000 + now[2]
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {-2, 0, 0, time} end
local waiters = redis.pcall('ZCARD', KEYS[3])
if type(waiters) == 'table' then waiters = 0 end
local fence = redis.pcall('GET', KEYS[2])
if type(fence) ~= 'string' then fence = '0' end
if not holder then return {1, fence, waiters, time} end
return {1, fence, waiters, time, holder, 1, redis.call('PTTL', KEYS[1])}
