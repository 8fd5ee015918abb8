-- The answer while another attempt holds the mutex comes before what only a grant needs.
--@include refuse_ended
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
local pttl = holder and redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end

--@include waiter_text
local waiter = waiter_for('mutex', '', '')
--@include queue

if holder and holder ~= attempt then
  queue(place or time, 0)
  return {pttl, time}
end
