local function writer_waits()
  return redis.pcall('ZRANGEBYSCORE', KEYS[3], 0, '+inf', 'LIMIT', 0, 1)[1]
end
