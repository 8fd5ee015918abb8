-- rwlock/downgrade.lua: go from writing to reading, without an instant between.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire: which hold to change
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  time    it reads, for at least ttl_ms from now, under the token that it had; the clock in microseconds
--          0       lost: over, released, or somebody else's; nothing is changed
--          -2      lost: the key holds something that is not a read-write lock
--
-- If the owner has no other hold to write, all readers who wait are let in. Delivered twice, it changes once, and lasts
-- longer by as little as the deliveries are apart.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ''
--@include clock
local ends = now + ttl_ms

-- The longest lease, which whoever admits a node must wait for.
if KEYS[4] and ttl_ms > tonumber(redis.call('HGET', KEYS[4], 'ttl') or 0) then
  redis.call('HSET', KEYS[4], 'ttl', ttl_ms)
end

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
