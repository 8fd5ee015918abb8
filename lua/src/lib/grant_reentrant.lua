local function grant(its_attempt, its_owner, its_token, ms)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'mode', string.format('reentrant %.0f', its_token), its_owner, 1,
    ':' .. its_attempt, 1)
  redis.call('PEXPIRE', KEYS[1], ms)
end
