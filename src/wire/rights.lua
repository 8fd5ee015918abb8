-- Tries each command that the scripts of locks use, or with "1" those that read, and returns those
-- that the user may not run, as ACL SETUSER takes them.
--
-- The key is new. Then it holds a string for a second: what is for other types is refused for its
-- type, unless it is refused for a missing right before, and changes nothing.
local key, missing = KEYS[1], {}

local function may(command, ...)
  local reply = redis.pcall(command, ...)
  local problem = type(reply) == 'table' and reply.err or ''
  local is_refused = string.find(problem, "can't run", 1, true)
    or string.find(problem, 'no permissions', 1, true)
  if is_refused then missing[#missing + 1] = '+' .. command end
  return problem == ''
end

local of_key = 'get pttl exists hkeys hgetall hlen hrandfield zrandmember'
for command in string.gmatch(of_key, '%l+') do may(command, key) end
local of_field = 'hget hmget hexists zscore zmscore'
for command in string.gmatch(of_field, '%l+') do may(command, key, 'x') end
local of_range = 'zcount zrange zrangebyscore'
for command in string.gmatch(of_range, '%l+') do may(command, key, '0', '1') end
may('time')
if ARGV[1] == '1' then return missing end

may('hdel', key, 'x')
may('zrem', key, 'x')
may('pexpire', key, '1000')
if may('set', key, '1', 'PX', '1000') then
  may('incrby', key, '1')
  may('decrby', key, '1')
  may('hset', key, 'x', '1')
  may('hincrby', key, 'x', '1')
  may('zadd', key, '1', 'x')
  may('del', key)
end
return missing
