local function grant(waiter_attempt, waiter_owner, granted_token, ms)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'mode', string.format('reentrant %.0f', granted_token), waiter_owner, '1',
    ':' .. waiter_attempt, '1')
  redis.call('PEXPIRE', KEYS[1], ms)
end
