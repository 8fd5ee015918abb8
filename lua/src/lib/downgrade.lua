--@include leave_write
if not is_reading then reads = (reads and reads .. ' ' or '') .. attempt end
redis.call('HDEL', KEYS[1], 'read:')
redis.call('HSET', KEYS[1], 'read:' .. owner, math.max(ends, read_ends or 0) .. ' ' .. reads)
if not state.read then redis.call('HINCRBY', KEYS[1], 'readers', 1) end
keep_until(ends)
if is_writing then admit_waiters() end
return time
