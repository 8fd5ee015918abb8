-- rwlock/renew.lua: extend one hold, of either side, if its owner still has it.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
--
-- Returns  time    held for at least ttl_ms from now; the server's clock in microseconds
--          0       lost: over, released, or somebody else's; nothing is changed
--          -2      lost: the key holds something that is not a read-write lock
--
-- Delivered twice, it extends twice, by as little as the deliveries are apart. It touches no other owner's
-- hold, and never shortens what another hold of the same owner was promised.
local owner, attempt, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
--@include clock

--@include unexpired

--@include has

local state = redis.pcall('HMGET', KEYS[1], 'read:' .. owner, 'write', 'sole')
if state.err then return -2 end
if state[3] then
  if string.match(state[3], '^%S+ (.+)$') ~= owner .. ' ' .. attempt then return 0 end
  if redis.call('PTTL', KEYS[1]) < ttl_ms then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
  return time
end
local field, ends, words = 'read:' .. owner, live(state[1])
if not words or not has(words, attempt) then
  field, ends, words = 'write', live(state[2])
  if not words or string.match(words, '^%S+') ~= owner or not has(words, attempt) then return 0 end
end
if ends < now + ttl_ms then
  -- A full server refuses HSET as the first write of a script.
  if redis.call('PTTL', KEYS[1]) < ttl_ms then
    redis.call('PEXPIREAT', KEYS[1], now + ttl_ms)
  else
    redis.call('HDEL', KEYS[1], 'read:')
  end
  redis.call('HSET', KEYS[1], field, now + ttl_ms .. ' ' .. words)
end
return time
