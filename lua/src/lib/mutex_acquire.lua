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
