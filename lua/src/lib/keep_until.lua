-- The key lasts until the latest end of a hold.
local function keep_until(ends)
  if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end
end

-- The lock has no writer any more. Readers that queued before this go before the next writer, but
-- not those that ask right now. HDEL comes first, since a full server refuses HSET as the first
-- write.
local function end_write()
  redis.call('HDEL', KEYS[1], 'upgrade')
  redis.call('HSET', KEYS[1], 'writer_left', string.format('%.0f', time - 1))
  redis.call('HDEL', KEYS[1], 'write')
end
