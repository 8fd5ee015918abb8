-- False also if the key holds something else. Only asked, so that a server that refuses to write says so when it is
-- to write.
local function is_queued()
  return type(redis.pcall('ZSCORE', KEYS[3], waiter)) == 'string'
end
