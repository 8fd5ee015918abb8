-- fenced/set.lua: write a value, unless a later lease has written already. For the resource, not for the lock.
--
-- KEYS[1]  value    string: the value
-- KEYS[2]  token    string: the largest fencing token that has written; no ttl
-- ARGV[1]  token    the writer's fencing token
-- ARGV[2]  value    what to write
--
-- Returns  { 1, token, 0}    written
--          { 0, token, 0}    refused: this larger token has written already
--
-- Compare and write are one step, which is what makes a fencing token worth having: a holder that was
-- paused past its lease cannot overwrite what its successor wrote. Delivered twice, it writes the same twice.
-- The same in SQL:
--   UPDATE things SET value = $value, token = $token WHERE id = $id AND token <= $token;
-- with 0 rows changed for a refusal.
local largest = tonumber(redis.call('GET', KEYS[2]) or 0)
local token = tonumber(ARGV[1])
if token < largest then return {0, largest, 0} end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2])
return {1, token, 0}
