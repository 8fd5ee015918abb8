--@include is_ended

--@include reentrant_token

--@include waiter

--@include waiter_text
local waiter = waiter_for('reentrant', owner, ' ' .. depth)
--@include queue

--@include leave_queue

--@include notify

--@include grant_reentrant

--@include grant_next

if is_ended() then return -1 end
local held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
if held.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end
local current = pttl ~= -2 and reentrant_token(held[3])
if not current and pttl ~= -2 then return -2 end
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
if pttl ~= -2 then
  queue(place or time, 0)
  return {pttl, time}
end

-- The lock is free, but earlier waiters are queued.
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
