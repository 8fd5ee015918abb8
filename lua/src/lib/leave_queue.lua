-- Only if it is queued, so that a server that refuses to write says so where there is something to
-- write.
local function leave_queue(waiter)
  if not claim or type(redis.pcall('ZSCORE', KEYS[3], waiter)) ~= 'string' then return false end
  redis.call('ZREM', KEYS[3], waiter, 'seen ' .. attempt)
  return true
end
