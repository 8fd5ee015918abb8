-- The lock is kept until the latest end of a hold.
local function keep_until(ends)
  if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end
end
