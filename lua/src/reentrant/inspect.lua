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
--@include inspection
--@include reentrant_token

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
