redis.call('HSET', KEYS[1], 'mode', string.format('reentrant %.0f', token), owner, '1', ':' .. attempt, '1')
redis.call('PEXPIRE', KEYS[1], ttl_ms)
