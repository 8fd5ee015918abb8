-- reentrant/inspect: generated from its source in lua/src, do not edit.
-- reentrant/inspect: the owner of the lock, its holds, its remaining time, and the number of
-- waiters. Writes nothing.
--
-- KEYS[1]  lock      hash: the owner and its count, `mode`, and `:<attempt>` for each hold
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
-- The token of a re-entrant lock, 0 if it has none; nil if the hash is something else. A Redisson
-- RLock is one field `<UUID>:<thread>` -> count.
local function reentrant_token(mode)
  if mode then return to_token(string.match(mode, '^reentrant (%d+)$')) end
  local field = redis.call('HLEN', KEYS[1]) == 1 and redis.call('HRANDFIELD', KEYS[1])
  local is_redisson = field and string.find(field, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    and tonumber(redis.call('HGET', KEYS[1], field))
  return is_redisson and 0 or nil
end

local fields = redis.pcall('HGETALL', KEYS[1])
if fields.err then return {-2, '0', 0, time} end
local found = {1, token, waiting, time}
if not fields[1] then return found end
local mode
for i = 1, #fields, 2 do
  if fields[i] == 'mode' then mode = fields[i + 1] end
end
if not reentrant_token(mode) then return {-2, '0', 0, time} end
for i = 1, #fields, 2 do
  if fields[i] ~= 'mode' and string.sub(fields[i], 1, 1) ~= ':' then
    found[#found + 1] = fields[i]
    found[#found + 1] = tonumber(fields[i + 1]) or 0
    found[#found + 1] = redis.call('PTTL', KEYS[1])
  end
end
return found
