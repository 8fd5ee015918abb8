-- rwlock/read_force.lua: take the lock away from everybody who reads.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: the answer with which this request was ended
-- ARGV[1]  owner     empty
-- ARGV[2]  attempt   fresh for every request, the same in every delivery; ignored beside KEYS[4]
-- ARGV[3]  ended_ms  for how long to remember this answer
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  n     taken away from n readers; whoever may now enter is let in
--          0     nobody read
--          -2    the key holds something that is not a read-write lock; nothing is changed
--          -3    the key holds something without a ttl; nothing is changed
--
-- Whoever writes, keeps that. The readers learn of the loss from their next renewals or releases. Delivered
-- twice, it takes the lock away once: those who were let in by the first delivery keep it.
local owner, ended_ms, floor, waiter = '', tonumber(ARGV[3]), ARGV[4], ''
--@include clock

--@include next_token

--@include readers_token

--@include record_answer

--@include unexpired

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include other_reader

--@include expand_sole_hold

--@include tidy

--@include recorded_answer
local known = {'write', 'fence', 'gate', 'phase', 'upgrade', 'sweep', 'readers'}
local state = redis.pcall('HMGET', KEYS[1], unpack(known))
if state.err then return once(-2) end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return once(-3) end
unfold()
state = redis.call('HMGET', KEYS[1], unpack(known))
if not state[7] or not other_reader() then return once(0) end
state = redis.call('HMGET', KEYS[1], unpack(known))
local answer = once(tonumber(redis.call('HGET', KEYS[1], 'readers')))

-- To delete the whole and to write back what stays takes less time than to delete ten thousand fields.
local rest = {}
local function keep(field, value)
  if value then
    rest[#rest + 1] = field
    rest[#rest + 1] = value
  end
end
for i = 1, 6 do keep(known[i], state[i]) end
if redis.call('HLEN', KEYS[1]) ~= answer + #rest / 2 + 1 then
  rest = {}
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if field ~= 'readers' and string.sub(field, 1, 5) ~= 'read:' then
      keep(field, redis.call('HGET', KEYS[1], field))
    end
  end
end
redis.call('UNLINK', KEYS[1])
for i = 1, #rest, 2 do redis.call('HSET', KEYS[1], rest[i], rest[i + 1]) end
if rest[1] then redis.call('PEXPIRE', KEYS[1], pttl) end
let_in()
tidy()
return answer
