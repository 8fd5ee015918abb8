local ends = now + ttl_ms

local function look()
  return redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'gate', 'read:' .. owner, 'fence', 'sole')
end
local state = look()
if state.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end
