local sole = 'sole write ' .. owner .. ' ' .. attempt
if token > 0 then
  redis.call('HSET', KEYS[1], 'mode', sole, 'token', string.format('%.0f', token))
else
  redis.call('HSET', KEYS[1], 'mode', sole)
end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
