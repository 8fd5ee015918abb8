-- A counter above a floor: INCR is enough until the counter is lost or the clock has passed it.
local function next_token()
  local token = redis.call('INCR', KEYS[2])
  local least = tonumber(floor) or 0
  if token == 1 or token <= least then
    local now = redis.call('TIME')
    token = math.max(least + 1, now[1] * 1000000 + now[2])
    redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', 86400000)
  end
  if token > 9007199254740991 then
    redis.call('DECR', KEYS[2])
    error('the fencing counter is at 2^53')
  end
  return token
end
