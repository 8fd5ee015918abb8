-- rwlock/write_force.lua: take the lock away from whoever writes.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: the answer with which this request was ended
-- ARGV[1]  owner     ignored
-- ARGV[2]  attempt   fresh for every request, the same in every delivery; ignored beside KEYS[4]
-- ARGV[3]  ended_ms  for how long to remember this answer
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  n     taken away, with all n holds to write; whoever may now enter is let in
--          0     nobody wrote
--          -2    the key holds something that is not a read-write lock; nothing is changed
--          -3    the key holds something without a ttl; nothing is changed
--
-- What the writer reads besides, he keeps. He learns of the loss from his next renewal or release. Delivered
-- twice, it takes the lock away once: the heir of the first delivery keeps it.
local ended_ms, floor, waiter = tonumber(ARGV[3]), ARGV[4], ''
--@include clock

--@include next_token

--@include readers_token

--@include record_answer

--@include unexpired

--@include count

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include expand_sole_hold

--@include tidy

--@include recorded_answer
local state = redis.pcall('HMGET', KEYS[1], 'write')
if state.err then return once(-2) end
if redis.call('PTTL', KEYS[1]) == -1 then return once(-3) end
unfold()
state = redis.call('HMGET', KEYS[1], 'write')
local _, write = live(state[1])
if not write then return once(0) end
local answer = once(count(write) - 1)
end_write()
let_in()
tidy()
return answer
