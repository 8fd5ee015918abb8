redis.call('HSET', KEYS[1], 'mode', 'sole read ' .. owner .. ' ' .. attempt)
redis.call('PEXPIRE', KEYS[1], ttl_ms)
