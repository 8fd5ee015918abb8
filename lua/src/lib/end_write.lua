-- Nobody writes any more: who queued before this goes before the next writer, but not who asks right now. HDEL
-- comes first, since a full server refuses HSET as the first write; and the key must not be empty in between.
local function end_write()
  redis.call('HDEL', KEYS[1], 'upgrade')
  redis.call('HSET', KEYS[1], 'phase', string.format('%.0f', time - 1))
  redis.call('HDEL', KEYS[1], 'write')
end
