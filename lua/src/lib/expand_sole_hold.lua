-- A hold that is alone is the field `mode`, and ends with the key. When another one comes, it gets
-- a field and an end of its own. HDEL comes first, since a full server refuses HSET as the first
-- write of a script.
local function expand_sole_hold()
  local side, holder_owner, holder_attempt = string.match(state.mode or '', '^sole ([^ ]+) ([^ ]+) ([^ ]+)$')
  if not side then return end
  local hold = now + math.max(state.pttl, 1) .. ' '
  redis.call('HDEL', KEYS[1], 'read:')
  if side == 'read' then
    redis.call('HSET', KEYS[1], 'mode', 'several', 'read:' .. holder_owner, hold .. holder_attempt, 'readers', 1)
  else
    redis.call('HSET', KEYS[1], 'mode', 'several', 'write', hold .. holder_owner .. ' ' .. holder_attempt)
  end
  local last_token = side == 'read' and redis.pcall('GET', KEYS[2])
  if type(last_token) == 'string' then redis.call('HSET', KEYS[1], 'token', last_token) end
  read_state()
end
