-- reentrant/inspect.lua: who holds the lock, how often, for how long, and how many wait. Writes nothing.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt" for each hold; ":fence" -> its token
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
--
-- Returns  { 1, fence, waiters, time}    then for each holder: owner, count, pttl
--          {-2, 0, 0, time}              the key holds something that is not a re-entrant lock
--
-- fence is the last token granted, as a string, or '0'. A pttl of -1 is a key without a ttl.
local now = redis.call('TIME')
local time = now[1] * 1000000 + now[2]
local fields = redis.pcall('HGETALL', KEYS[1])
if fields.err then return {-2, 0, 0, time} end
local waiters = redis.pcall('ZCARD', KEYS[3])
if type(waiters) == 'table' then waiters = 0 end
local fence = redis.pcall('GET', KEYS[2])
if type(fence) ~= 'string' then fence = '0' end
local answer = {1, fence, waiters, time}
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 1) ~= ':' then
    answer[#answer + 1] = fields[i]
    answer[#answer + 1] = tonumber(fields[i + 1]) or 0
    answer[#answer + 1] = redis.call('PTTL', KEYS[1])
  end
end
return answer
