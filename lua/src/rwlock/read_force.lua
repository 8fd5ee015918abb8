-- rwlock/read_force: revokes the holds of all readers.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every call, the same in each delivery
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  token_ttl_ms   as in acquire; default: 3600000
-- ARGV[4]  only_from      an owner: revoke the lock from this one only; default: from any
--
-- Returns  n    revoked from n readers; waiters that may enter are admitted
--          0    there was no such reader
--          -2   refused: the key holds something else
--          -3   refused: the key has no TTL
--          -5   refused: an argument is malformed
--
-- A writer keeps its hold. The readers learn of it from their next renewals or releases. A second
-- delivery within a minute gets the first answer, and revokes nothing of readers that were
-- admitted since.
local attempt, min_token, token_ttl_ms, only_from = unpack(ARGV)
local remember, owner = '1', ''
--@include check_force

--@include force_common

--@include other_reader

local refusal = read_state()
if refusal then return answer(refusal) end
expand_sole_hold()
if only_from then
  if not unexpired(redis.call('HGET', KEYS[1], 'read:' .. only_from)) then return answer(0) end
  local number = answer(1)
  redis.call('HDEL', KEYS[1], 'read:' .. only_from)
  redis.call('HSET', KEYS[1], 'readers', state.readers - 1)
  admit_waiters()
  delete_if_free()
  return number
end
if state.readers == 0 or not other_reader() then return answer(0) end
read_state()
local number = answer(state.readers)

-- To delete the hash and to write the other fields again takes less time than to delete ten
-- thousand fields.
local rest, known = {}, {'mode', 'write', 'token', 'writer_wait_until', 'upgrade', 'writer_left'}
local values = redis.call('HMGET', KEYS[1], unpack(known))
for i, field in ipairs(known) do
  if values[i] then
    rest[#rest + 1] = field
    rest[#rest + 1] = values[i]
  end
end
if redis.call('HLEN', KEYS[1]) ~= state.readers + #rest / 2 + 1 then
  rest = {}
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if field ~= 'readers' and string.sub(field, 1, 5) ~= 'read:' then
      rest[#rest + 1] = field
      rest[#rest + 1] = redis.call('HGET', KEYS[1], field)
    end
  end
end
redis.call('UNLINK', KEYS[1])
for i = 1, #rest, 2 do redis.call('HSET', KEYS[1], rest[i], rest[i + 1]) end
redis.call('PEXPIRE', KEYS[1], math.max(state.pttl, 1))
admit_waiters()
delete_if_free()
return number
