-- fenced/set.lua: write a value, unless a later lease has written already. For the resource, not for the lock.
--
-- KEYS[1]  value    string: the value
-- KEYS[2]  token    string: the largest fencing token that has written; no ttl; in the slot of the value
-- ARGV[1]  token    the writer's fencing token
-- ARGV[2]  value    what to write
--
-- Returns  1    written
--          0    refused: a larger token has written already
--
-- Compare and write are one step, which is what makes a fencing token worth having: a holder that was
-- paused past its lease cannot overwrite what its successor wrote. Delivered twice, it writes the same twice.
-- The README has the same in SQL.
if not string.match(ARGV[1], '^%d+$') then return redis.error_reply('ERR the token must be an integer') end
if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[2]) or 0) then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2])
return 1
