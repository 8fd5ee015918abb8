-- mutex/inspect: generated from its source in lua/src, do not edit.
-- mutex/inspect: the holder of the mutex, its remaining time, and the number of waiters. Writes
-- nothing.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiters by their places, and marks
--
-- Returns  {1, token, waiters, time}   then, if it is held: owner, count, pttl
--          {-2, '0', 0, time}          refused: the key holds something else
--
-- token is a string, '0' if there is none. A pttl of -1 is a key without a TTL.
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)
-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end
local waiting = redis.pcall('ZCOUNT', KEYS[3], '-inf', '(4503599627370496')
if type(waiting) == 'table' then waiting = 0 end
local token = redis.pcall('GET', KEYS[2])
if type(token) ~= 'string' or not to_token(token) then token = '0' end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {-2, '0', 0, time} end
if not holder then return {1, token, waiting, time} end
return {1, token, waiting, time, holder, 1, redis.call('PTTL', KEYS[1])}
