local function grant(to_owner, to, until_ms, token)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], to_owner, 1, ':fence', string.format('%.0f', token), ':' .. to, 1)
  redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', until_ms))
end
