-- The token of a re-entrant lock, 0 if it has none; nil if the hash is something else. A Redisson
-- RLock is one field `<UUID>:<thread>` -> count.
local function reentrant_token(mode)
  if mode then return to_token(string.match(mode, '^reentrant (%d+)$')) end
  local field = redis.call('HLEN', KEYS[1]) == 1 and redis.call('HRANDFIELD', KEYS[1])
  local is_redisson = field and string.find(field, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    and tonumber(redis.call('HGET', KEYS[1], field))
  return is_redisson and 0 or nil
end
