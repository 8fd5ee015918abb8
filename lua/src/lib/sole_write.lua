redis.call('HSET', KEYS[1], 'mode', 'sole write ' .. owner .. ' ' .. attempt)
if token > 0 then redis.call('HSET', KEYS[1], 'token', string.format('%.0f', token)) end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
