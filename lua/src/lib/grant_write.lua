redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. owner .. ' ' .. (nested and attempts or attempt))
keep_until(ends)
if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end
if token > 0 then
  redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token))
elseif not nested then
  redis.call('HDEL', KEYS[1], 'fence')
end
if nested then
  if state[5] and not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
  return token
end
local _, upgrader = live(state[4])
if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate', 'upgrade') end
return token
