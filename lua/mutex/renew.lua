-- mutex/renew: generated from its source in lua/src, do not edit.
-- mutex/renew: extends the lease, if this attempt still has it.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex, with a TTL
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  ttl_ms    1 to 9999999999, counted from now
--
-- Returns  time   held for ttl_ms from now; the server's clock in microseconds
--          0      lost: expired, released, or another attempt's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- A second delivery extends the lease again, by as little as the deliveries are apart. It never
-- creates the key.
local attempt, ttl_ms = unpack(ARGV)
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
if holder ~= attempt then return 0 end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
local clock = redis.call('TIME')
return clock[1] * 1000000 + clock[2]
