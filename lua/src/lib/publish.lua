-- Not passed on to replicas: who listens to one is not counted, and must not hear that he has what goes to the next.
local function publish(channel, message)
  redis.set_repl(redis.REPL_NONE)
  local heard = redis.pcall('PUBLISH', channel, message)
  redis.set_repl(redis.REPL_ALL)
  return heard
end
