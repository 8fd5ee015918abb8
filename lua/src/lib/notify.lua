-- `attempt,attempt token time lock`: which attempts were granted the lock, with which token, at
-- which microsecond.
local function message(attempts, granted_token)
  return attempts .. string.format(' %.0f ', granted_token)
    .. clock[1] .. string.format('%06d ', clock[2]) .. KEYS[1]
end

-- False: the channel has no subscriber, so the waiter is dead. Where a channel ends in "~", the
-- waiter may listen to another node of a cluster, which PUBLISH does not count.
--
-- An error is a channel that this user may not publish to. The message is not replicated:
-- subscribers of a replica are not in our count, and must not be notified of a lock that is granted
-- to the next waiter.
local function notify(waiter_channel, text)
  if waiter_channel == '' then return true end
  redis.set_repl(redis.REPL_NONE)
  local receivers = redis.pcall('PUBLISH', waiter_channel, text)
  redis.set_repl(redis.REPL_ALL)
  return receivers ~= 0 or string.sub(waiter_channel, -1) == '~'
end
