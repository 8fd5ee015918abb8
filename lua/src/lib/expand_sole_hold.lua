-- A hold that was alone ends with the key, until somebody else comes: from then on it has an end of its own.
-- HDEL comes first, since a full server refuses HSET as the first write of a script.
local function unfold()
  local sole = redis.pcall('HGET', KEYS[1], 'sole')
  local side, its_owner, its_attempt = string.match(type(sole) == 'string' and sole or '', '^(%S+) (%S+) (%S+)$')
  if not side then return end
  local ends = now + math.max(redis.call('PTTL', KEYS[1]), 1)
  redis.call('HDEL', KEYS[1], 'read:')
  if side == 'read' then
    redis.call('HSET', KEYS[1], 'read:' .. its_owner, ends .. ' ' .. its_attempt, 'readers', 1)
  else
    redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. its_owner .. ' ' .. its_attempt)
  end
  local token = side ~= 'unfenced' and redis.pcall('GET', KEYS[2])
  if type(token) == 'string' then redis.call('HSET', KEYS[1], 'fence', token) end
  redis.call('HDEL', KEYS[1], 'sole')
end
