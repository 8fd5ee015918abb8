--@include grant_next

-- Free, but others queued first: theirs, if one of them can be notified.
local claimed, token = hand_over()
if claimed then
  queue(time)
  return {claimed, time}
end
token = floor ~= '' and (token or next_token()) or 0
if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
grant(owner, attempt, now + ttl_ms, token)
return token
