-- A mark of an ended attempt is no waiter: with one of them, all requests for the lock would be
-- sent alone for a minute.
local function has_waiter()
  if redis.call('EXISTS', KEYS[2]) == 0 then return false end
  local first = redis.pcall('ZRANGE', KEYS[2], '0', '0', 'WITHSCORES')
  return (tonumber(first[2]) or 0) < 2^52
end
