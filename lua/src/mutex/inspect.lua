-- mutex/inspect: the holder of the mutex, its remaining time, and the number of waiters. Writes
-- nothing.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiters by their places, and marks
--
-- Returns  {1, token, waiters, time}   then, if it is held: owner, count, pttl
--          {-2, '0', 0, time}          refused: the key holds something else
--
-- token is a string, '0' if there is none. A pttl of -1 is a key without a TTL.
--@include inspection
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {-2, '0', 0, time} end
if not holder then return {1, token, waiting, time} end
return {1, token, waiting, time, holder, 1, redis.call('PTTL', KEYS[1])}
