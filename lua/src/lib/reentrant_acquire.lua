--@include leave_queue

if held[1] then
  local count = tonumber(held[1])
  if not count then return -2 end
  if not held[2] and count >= depth then return -4 end
  local token, refusal = hold_token(current, held[2] and count == 1, not held[2])
  if not token then return refusal end
  if not held[2] then
    redis.call('HINCRBY', KEYS[1], owner, 1)
    redis.call('HSET', KEYS[1], ':' .. attempt, 1)
  end
  if not held[3] or token > 0 and token ~= current then
    redis.call('HSET', KEYS[1], 'mode', string.format('reentrant %.0f', token))
  end
  if held[2] or pttl < tonumber(ttl_ms) then redis.call('PEXPIRE', KEYS[1], math.max(pttl, ttl_ms)) end
  leave_queue(waiter)
  return token
end

-- The lock is free, but earlier waiters are queued.
--@include waiter

--@include notify

--@include grant_reentrant

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
grant(attempt, owner, token, ttl_ms)
return token
