-- mutex/force: revokes the holder's mutex.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every call, the same in each delivery
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  token_ttl_ms   as in acquire; default: 3600000
-- ARGV[4]  only_from      an attempt: revoke the mutex from this one only; default: from any
--
-- Returns  1    revoked: granted to the next waiter, or free
--          0    it was free, or another attempt's
--          -2   refused: the key holds something else
--          -3   refused: the key has no TTL
--          -5   refused: an argument is malformed
--
-- The former holder learns of it from its next renewal or release. A second delivery within a
-- minute gets the first answer, and revokes nothing of the next holder.
local attempt, min_token, token_ttl_ms, only_from = unpack(ARGV)
local kind, remember = 'mutex', '1'
--@include check_force

--@include clock

--@include limit_min_token

--@include next_token

--@include waiter

--@include notify

--@include grant_mutex

--@include grant_next

--@include remember

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return answer(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return answer(-3) end
if only_from and holder ~= only_from then return answer(0) end
local number = answer(holder and 1 or 0)
--@include revoke_token
local _, is_granted = grant_next()
if not is_granted then redis.call('DEL', KEYS[1]) end
return number
