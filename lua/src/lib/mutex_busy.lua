-- The answer while another attempt holds the mutex comes before what only a grant needs.
--@include waiter_text
local waiter = waiter_for('mutex', '', '')
--@include refuse_ended
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
local pttl = holder and redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end

--@include queue

if holder and holder ~= attempt then
  queue(place or time, 0, scores)
  return {pttl, time}
end
