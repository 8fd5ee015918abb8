-- Fields that mean nothing any more; those of somebody else stay.
local function tidy()
  local state = redis.call('HMGET', KEYS[1], 'write', 'readers')
  if not state[1] and (tonumber(state[2]) or 0) <= 0 then
    redis.call('HDEL', KEYS[1], 'readers', 'fence', 'gate', 'phase', 'upgrade', 'sweep')
  end
end
