local function grant(_, to, until_ms)
  redis.call('SET', KEYS[1], to, 'PXAT', string.format('%.0f', until_ms))
end
