-- rwlock/release.lua: give one hold up, or end an attempt whose outcome nobody waits for.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: the answer with which this attempt was ended; absent if ended_ms is 0
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire: which hold to give up
-- ARGV[3]  ended_ms  0, or for how long to remember this answer and to refuse the attempt
-- ARGV[4]  floor     a token that is handed over must be larger than this
-- ARGV[5]  waiter    as in acquire, to leave the queue; absent or empty: it is not queued
--
-- Returns  1     released, the last hold of its owner
--          1+n   released; the owner has n holds left
--          0     it held nothing
--          -2    the key holds something that is not a read-write lock
--
-- Whoever may now enter is let in: all readers who waited, or one writer. Delivered twice, it releases once.
-- Where the outcome of an acquire or of a release may stay unknown, send ended_ms: the second answer is then
-- the first one, and a late acquire is refused.
local owner, attempt, ended_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] or ''

-- The common case: nobody waits, and there is nothing to remember.
if ended_ms == 0 and waiter == '' then
  local sole = redis.pcall('HGET', KEYS[1], 'sole')
  if sole == 'read ' .. owner .. ' ' .. attempt or sole == 'write ' .. owner .. ' ' .. attempt then
    redis.call('HDEL', KEYS[1], 'sole')
    return 1
  end
  -- Or one of several readers.
  local state = redis.pcall('HMGET', KEYS[1], 'read:' .. owner, 'readers', 'write')
  local read, readers = state[1], tonumber(state[2] or 0)
  if read and readers > 1 and not state[3] and string.match(read, '^%d+ (%S+)$') == attempt
    and redis.call('EXISTS', KEYS[3]) == 0 then
    redis.call('HDEL', KEYS[1], 'read:' .. owner)
    redis.call('HSET', KEYS[1], 'readers', readers - 1)
    return 1
  end
end

--@include clock

--@include next_token

--@include readers_token

--@include is_queued

--@include record_answer

--@include unexpired

--@include has

--@include count

--@include without

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include expand_sole_hold

--@include tidy

--@include recorded_answer
unfold()
local state = redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner, 'upgrade')
if waiter ~= '' then
  local left = is_queued() and redis.call('ZREM', KEYS[3], waiter) == 1
  if not state.err and left then
    local _, upgrader = string.match(state[4] or '', '^(%d+) (.+)$')
    if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
    if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
  end
end
if state.err then return once(-2) end
local write_ends, writes, write = string.match(state[1] or '', '^(%d+) (%S+) (.+)$')
local read_ends, read = string.match(state[3] or '', '^(%d+) (.+)$')
if writes ~= owner then write = nil end
local writing, reading = write and has(write, attempt), read and has(read, attempt)
local answer = 0
if writing then
  local rest, left = without(write, attempt)
  write = left > 0 and rest
  if write then
    redis.call('HDEL', KEYS[1], 'read:')
    redis.call('HSET', KEYS[1], 'write', write_ends .. ' ' .. owner .. ' ' .. rest)
  else
    end_write()
  end
end
if reading then
  local rest, left = without(read, attempt)
  read = left > 0 and rest
  if read then
    redis.call('HDEL', KEYS[1], 'read:')
    redis.call('HSET', KEYS[1], 'read:' .. owner, read_ends .. ' ' .. rest)
  else
    redis.call('HDEL', KEYS[1], 'read:' .. owner)
    redis.call('HINCRBY', KEYS[1], 'readers', -1)
  end
end
if writing or reading then
  answer = 1 + (write and count(write) or 0) + (read and count(read) or 0)
end
once(answer)
let_in()
if state[1] or state[2] then tidy() end -- else the key may be anything
return answer
