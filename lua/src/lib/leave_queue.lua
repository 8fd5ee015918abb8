-- The attempt is removed only if it is queued: a server that refuses writes then reports that
-- only if there is something to write.
local function leave_queue(waiter)
  if not claim or type(redis.pcall('ZSCORE', KEYS[3], waiter)) ~= 'string' then return false end
  redis.call('ZREM', KEYS[3], waiter, 'seen ' .. attempt)
  return true
end
