-- The answer while another owner holds the lock comes before what only a grant needs.
--@include waiter_text
local waiter = waiter_for('reentrant', owner, ' ' .. depth)
--@include refuse_ended

--@include reentrant_token

local held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
if held.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end
local current = pttl ~= -2 and reentrant_token(held[3])
if not current and pttl ~= -2 then return -2 end

--@include queue

if pttl ~= -2 and not held[1] then
  queue(place or time, 0, scores)
  return {pttl, time}
end
