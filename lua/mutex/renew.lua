-- mutex/renew.lua: extend the lease, if it is still this attempt's.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- ARGV[1]  owner     ignored: the one holder of a mutex is the attempt
-- ARGV[2]  attempt   as in acquire
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
--
-- Returns  { 1, 0, time}    held for ttl_ms from now; the server's clock in microseconds
--          { 0, 0, time}    lost: expired, released, or somebody else's; nothing is changed
--          {-2, 0, time}    lost: the key holds something that is not a mutex
--
-- Delivered twice, it extends twice, by as little as the deliveries are apart. It never creates the key.
local attempt, ttl_ms = ARGV[2], ARGV[3]

local now = redis.call('TIME')
local time = now[1] * 1000000 + now[2]
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {-2, 0, time} end
if holder ~= attempt then return {0, 0, time} end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
return {1, 0, time}
