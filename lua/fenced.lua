-- redlatch, wire version 1: the resource's side of fencing. Licence: MIT OR Apache-2.0.
--
-- Writes a value, unless a later lease has written. Compare and write are one step: a holder that
-- was paused past its lease cannot overwrite what its successor wrote.
--
--   EVALSHA sha1 2  value token   token value
--
--   value  key: string, the value; a write removes its TTL, and what the key holds of another type
--   token  key: string, the largest fencing token that has written; without a TTL, in the slot of
--          the value
--   token  1 to 2^53 - 1: the fencing token of the writer
--   value  what to write
--
--   1      written. A second delivery writes its value again, over a later one of the same token:
--          so a token is for one write, unless no request is ever repeated
--   0      refused: a larger token has written already
--
-- A malformed word is an error, since callers read the answer as a boolean.

local token, value = ARGV[1], ARGV[2]
if not token or not string.find(token, '^[1-9]%d*$') or tonumber(token) >= 2^53 then
  return {err = 'ERR the token must be an integer from 1 to 2^53 - 1'}
end
if not value then return {err = 'ERR there is no value to write'} end
local largest = redis.call('GET', KEYS[2]) or '0'
if not string.find(largest, '^%d+$') or tonumber(largest) >= 2^53 then
  return {err = 'ERR the key ' .. KEYS[2] .. ' does not hold a token'}
end
if tonumber(token) < tonumber(largest) then return 0 end
redis.call('SET', KEYS[2], token)
redis.call('SET', KEYS[1], value)
return 1
