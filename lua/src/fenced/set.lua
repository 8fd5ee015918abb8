-- fenced/set: writes a value, unless a later lease has written. For the resource, not for the lock.
--
-- KEYS[1]  value   string: the value
-- KEYS[2]  token   string: the largest fencing token that has written, without a TTL; in the slot
--                  of the value
-- ARGV[1]  token   an integer: the fencing token of the writer
-- ARGV[2]  value   what to write
--
-- Returns  1   written
--          0   refused: a larger token has written already
--
-- Compare and write are one step: a holder that was paused past its lease cannot overwrite what its
-- successor wrote. A second delivery writes the same again.
if not string.match(ARGV[1], '^%d+$') then return redis.error_reply('ERR the token must be an integer') end
if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[2]) or 0) then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2])
return 1
