--@include clock
local ends = now + ttl_ms

--@include next_token

--@include readers_token

--@include unexpired

--@include has

--@include without

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include expand_sole_hold

unfold()
local state = redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner)
if state.err then return -2 end
local write_ends, write = live(state[1])
local writes, attempts = string.match(write or '', '^(%S+) (.+)$')
local read_ends, reads = live(state[3])
local reading, writing = reads and has(reads, attempt), writes == owner and has(attempts, attempt)
if reading and not writing then
  redis.call('HDEL', KEYS[1], 'read:')
  redis.call('HSET', KEYS[1], 'read:' .. owner, math.max(ends, read_ends) .. ' ' .. reads)
  keep_until(ends)
  return time
end
if not writing then return 0 end

local rest, left = without(attempts, attempt)
if left > 0 then
  redis.call('HDEL', KEYS[1], 'read:')
  redis.call('HSET', KEYS[1], 'write', write_ends .. ' ' .. owner .. ' ' .. rest)
else
  end_write()
end
ends = math.max(ends, read_ends or 0)
local holds = reading and reads or (reads and reads .. ' ' or '') .. attempt
redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. holds)
if not state[3] then redis.call('HINCRBY', KEYS[1], 'readers', 1) end
keep_until(ends)
let_in()
return time
