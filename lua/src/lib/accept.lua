local function accept(token)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', 86400000)
  if KEYS[5] and token > tonumber(node[3] or 0) then
    redis.call('HSET', KEYS[5], 'high', string.format('%.0f', token))
  end
  return token
end
