-- Whether the lock is free and nothing waits for it. A mark of an ended attempt is no waiter: with
-- one of them, all requests for the lock would be sent alone for a minute.
local function is_free(attempt)
  local keys = redis.call('EXISTS', KEYS[1], KEYS[3])
  if keys == 0 then return true end
  if keys == 2 or redis.call('EXISTS', KEYS[1]) == 1 then return false end
  local first = redis.pcall('ZRANGE', KEYS[3], '0', '0', 'WITHSCORES')
  return (tonumber(first[2]) or 0) >= 2^52 and not redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt)
end
