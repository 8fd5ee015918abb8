-- reentrant/renew: extends the lease of one hold, if its owner still has it.
--
-- KEYS[1]  lock      hash: the owner and its count, `mode`, and `:<attempt>` for each hold
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  ttl_ms    1 to 9999999999, counted from now
-- ARGV[3]  owner     as in acquire
--
-- Returns  time   held for at least ttl_ms from now; the server's clock in microseconds
--          0      lost: expired, released, or another owner's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- A second delivery extends the lease again, by as little as the deliveries are apart. It never
-- creates the key, and never shortens the lease of another hold of the same owner.
local attempt, ttl_ms, owner = unpack(ARGV)
--@include check_attempt
--@include check_ttl
--@include check_owner

--@include to_token

--@include reentrant_token

local held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
if held.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl ~= -2 and not reentrant_token(held[3]) then return -2 end
if not held[1] or not held[2] then return 0 end
if pttl < tonumber(ttl_ms) then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
local clock = redis.call('TIME')
return clock[1] * 1000000 + clock[2]
