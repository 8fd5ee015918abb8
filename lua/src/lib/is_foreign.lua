-- Fields that nobody here knows are a later version's, but for those of other kinds of locks: ours, and Redisson's.
local function is_foreign()
  local kinds = redis.call('HMGET', KEYS[1], ':fence', 'mode')
  local some = redis.call('HRANDFIELD', KEYS[1])
  return kinds[1] or kinds[2] or string.match(some or '', '^[%x-]+:%d+$')
end
