-- The token of the former holder is not the last one any more, as its client can find out.
if number > 0 and redis.call('EXISTS', KEYS[2]) == 1 then redis.pcall('INCR', KEYS[2]) end
