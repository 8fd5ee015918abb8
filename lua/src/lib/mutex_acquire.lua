--@include is_ended
if is_ended() then return -1 end
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
if holder then -- a second delivery, or a poll that finds what a release granted
  local token, refusal = hold_token(nil, true)
  if not token then return refusal end
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

-- The lock is free, but earlier waiters are queued.
--@include waiter

--@include leave_queue

--@include notify

--@include grant_mutex

--@include grant_next

local busy_ms, _, no_token = grant_next()
if no_token then return no_token end
if busy_ms then
  queue(place or time, 0)
  return {busy_ms, time}
end
local token, refusal = take_token(new_token)
if not token then return refusal end
leave_queue(waiter)
redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
return token
