-- rwlock/renew: extends the lease of one hold, if its owner still has it.
--
-- KEYS[1]  lock      hash: the holds, and the field `mode`
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  ttl_ms    1 to 9999999999, counted from now
-- ARGV[3]  owner     as in acquire; default: the attempt
--
-- Returns  time   held for at least ttl_ms from now; the server's clock in microseconds
--          0      lost: expired, released, or another owner's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- A second delivery extends the lease again, by as little as the deliveries are apart. It changes
-- no other owner's hold, and never shortens the lease of another hold of the same owner.
local attempt, ttl_ms, owner = unpack(ARGV)
--@include check_attempt
--@include check_ttl
--@include check_optional_owner

--@include clock_ms

--@include read_state

--@include holds

if read_state() then return -2 end
local ttl = tonumber(ttl_ms)
local sole = string.match(state.mode or '', '^sole [^ ]+ (.+)$')
if sole then
  if sole ~= owner .. ' ' .. attempt then return 0 end
  if state.pttl < ttl then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
  return time
end
local field, ends, words = 'read:' .. owner, unexpired(state.read)
if not words or not has(words, attempt) then
  field, ends, words = 'write', unexpired(state.write)
  if not words or string.match(words, '^[^ ]+') ~= owner or not has(words, attempt) then return 0 end
end
if ends < now + ttl then
  -- A full server refuses HSET as the first write of a script.
  if state.pttl < ttl then
    redis.call('PEXPIREAT', KEYS[1], now + ttl)
  else
    redis.call('HDEL', KEYS[1], 'read:')
  end
  redis.call('HSET', KEYS[1], field, now + ttl .. ' ' .. words)
end
return time
