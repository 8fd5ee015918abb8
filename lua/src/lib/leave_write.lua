if is_writing then
  writes = without(writes, attempt)
  if writes then
    redis.call('HDEL', KEYS[1], 'read:')
    redis.call('HSET', KEYS[1], 'write', write_ends .. ' ' .. owner .. ' ' .. writes)
  else
    end_write()
  end
end
