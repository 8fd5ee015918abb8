-- fenced/set: generated from its source in lua/src, do not edit.
-- fenced/set: writes a value, unless a later lease has written. For the resource, not for the lock.
--
-- KEYS[1]  value   string: the value
-- KEYS[2]  token   string: the largest fencing token that has written, without a TTL; in the slot
--                  of the value
-- ARGV[1]  token   1 to 2^53 - 1: the fencing token of the writer
-- ARGV[2]  value   what to write
--
-- Returns  1   written
--          0   refused: a larger token has written already
--
-- A malformed argument is an error reply, since callers read the answer as a boolean.
-- Compare and write are one step: a holder that was paused past its lease cannot overwrite what its
-- successor wrote. A second delivery writes the same again.
local token, value = ARGV[1], ARGV[2]
if not token or #token > 16 or not string.find(token, '^[1-9]%d*$') or tonumber(token) >= 2^53 then
  return redis.error_reply('ERR the token must be an integer from 1 to 2^53 - 1')
end
if not value then return redis.error_reply('ERR there is no value to write') end
-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end
local largest = to_token(redis.call('GET', KEYS[2]) or '0')
if not largest then return redis.error_reply('ERR the second key does not hold a token') end
if tonumber(token) < largest then return 0 end
redis.call('SET', KEYS[2], token)
redis.call('SET', KEYS[1], value)
return 1
