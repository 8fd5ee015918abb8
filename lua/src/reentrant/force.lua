-- reentrant/force.lua: take the lock away from whoever holds it.
--
-- KEYS[1]  lock      hash: owner -> how many holds it has; ":attempt" for each hold; ":fence" -> its token
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued
-- KEYS[4]  ended     string: the answer with which this request was ended
-- ARGV[1]  owner     ignored
-- ARGV[2]  attempt   fresh for every request, the same in every delivery; ignored beside KEYS[4]
-- ARGV[3]  ended_ms  for how long to remember this answer
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  n     taken away, with all n holds of its owner: handed to the next waiter, or free
--          0     nobody held it
--          -2    the key holds something that is not a re-entrant lock; nothing is changed
--          -3    the key holds something without a ttl; nothing is changed
--
-- The former holder learns of it from its next renewal or its release. Delivered twice, it takes the
-- lock away once: the heir of the first delivery keeps it.
local ended_ms, floor, waiter = tonumber(ARGV[3]), ARGV[4], ''

--@include next_token

--@include grant_reentrant

--@include grant_next

--@include record_answer

--@include recorded_answer
local fields = redis.pcall('HGETALL', KEYS[1])
if fields.err then return once(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return once(-3) end
local count
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 1) ~= ':' then count = tonumber(fields[i + 1]) or 0 end
end
local answer = count and once(count) or once(0)
if not hand_over() then redis.call('DEL', KEYS[1]) end
return answer
