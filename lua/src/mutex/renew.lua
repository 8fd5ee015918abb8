-- mutex/renew.lua: extend the lease, if it is still this attempt's.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- ARGV[1]  owner     ignored: the one holder of a mutex is the attempt
-- ARGV[2]  attempt   as in acquire
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
--
-- Returns  time    held for ttl_ms from now; the server's clock in microseconds
--          0       lost: expired, released, or somebody else's; nothing is changed
--          -2      lost: the key holds something that is not a mutex
--
-- Delivered twice, it extends twice, by as little as the deliveries are apart. It never creates the key.
local attempt, ttl_ms = ARGV[2], ARGV[3]

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
if holder ~= attempt then return 0 end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
local now = redis.call('TIME')
return now[1] * 1000000 + now[2]
