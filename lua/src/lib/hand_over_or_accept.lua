--@include grant_next

-- Free, but others queued first: theirs, if one of them can be notified.
if obstacle() and not mends then return {-8, obstacle()} end
local claimed, token = hand_over()
if claimed then
  queue(queued_at)
  return {claimed, time}
end
local blocked = obstacle(true)
if blocked and not mends then
  redis.call('DEL', KEYS[1]) -- from a waiter that was not notified
  return {-8, blocked}
end
token = floor ~= '' and not blocked and (not proposed and token or own_token()) or 0
if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
grant(owner, attempt, now + ttl_ms, token)
return token
