-- reentrant/renew.lua: extend the lease of one hold, if its owner still has it.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt" for each hold; ":fence" -> its token
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
--
-- Returns  time    held for at least ttl_ms from now; the server's clock in microseconds
--          0       lost: expired, released, or somebody else's; nothing is changed
--          -2      lost: the key holds something that is not a re-entrant lock
--
-- Delivered twice, it extends twice, by as little as the deliveries are apart. It never creates the key,
-- and never shortens what another hold of the same owner was promised.
local owner, attempt, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local holds = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt)
if holds.err then return -2 end
if not holds[1] or not holds[2] then return 0 end
if redis.call('PTTL', KEYS[1]) < ttl_ms then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
local now = redis.call('TIME')
return now[1] * 1000000 + now[2]
