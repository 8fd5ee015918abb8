-- A hold that is alone is the field `mode`, and ends with the key. When another one comes, it gets
-- a field and an end of its own. HDEL comes first, since a full server refuses HSET as the first
-- write of a script.
local function expand_sole_hold()
  local side, its_owner, its_attempt = string.match(state.mode or '', '^sole ([^ ]+) ([^ ]+) ([^ ]+)$')
  if not side then return end
  local hold = now + math.max(state.pttl, 1) .. ' '
  redis.call('HDEL', KEYS[1], 'read:')
  if side == 'read' then
    redis.call('HSET', KEYS[1], 'mode', 'several', 'read:' .. its_owner, hold .. its_attempt, 'readers', 1)
  else
    redis.call('HSET', KEYS[1], 'mode', 'several', 'write', hold .. its_owner .. ' ' .. its_attempt)
  end
  local its_token = side == 'read' and redis.pcall('GET', KEYS[2])
  if type(its_token) == 'string' then redis.call('HSET', KEYS[1], 'token', its_token) end
  look()
end
