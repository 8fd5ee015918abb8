-- rwlock/read_acquire.lua: read, read once more, or queue to read.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     a new token must be larger than this; of a quorum "=N": it is at least N, ">N": also if
--                    the owner writes with an earlier one; empty: none
-- ARGV[5]  limit     how many holds the owner may have to read
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent or empty: do not queue
-- ARGV[7]  crowd     how many may read or wait at a time; absent: 10000
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond that is the same on all nodes of a quorum; absent: now
--
-- Returns  token          granted: that of the last writer; 0 without fencing; of a quorum, the largest that this node
--                         knows: if it is more than was proposed, propose that, so that a majority knows it
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -7             refused: so many read or wait already
--          -9             refused: this node of a guarded quorum was not admitted since it started or lost its data
--
-- Busy: somebody else writes, or waits to write; who reads or writes already need not wait for the latter.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
local hold_of = owner .. ' ' .. attempt
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(hold_of, '^%S+ %S+$')) then
  return -5
end

--@include proposal

--@include restart_guard

-- The common case: nobody is there, and the last writer's token is known.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])
if keys == 0 and not proposed then
  local token = floor == '' and 0 or tonumber(redis.call('GET', KEYS[2]))
  if token and token >= (tonumber(floor) or 0) then
    redis.call('HSET', KEYS[1], 'sole', 'read ' .. hold_of)
    redis.call('PEXPIRE', KEYS[1], ttl_ms)
    return token
  end
end

--@include next_token

--@include readers_token

--@include largest_accepted

--@include accept

-- That of the last writer. Of a quorum: what is proposed, or more, which is larger than those of all writers before
-- and, once a majority knows it, smaller than those of all after.
local function current_token()
  if floor == '' then return 0 end
  if not proposed then return readers_token() end
  return accept(math.max(proposed, largest()))
end

if keys == 0 then
  local token = current_token()
  redis.call('HSET', KEYS[1], 'sole', 'read ' .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local ends = now + ttl_ms

local function look()
  return redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'gate', 'read:' .. owner, 'fence', 'sole')
end
local state = look()
if state.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end

-- That of the last writer, from the hash if there is one; of a quorum, only who writes may take it from there.
local function known_token(writes)
  if floor == '' then return 0 end
  local nested = writes and string.byte(floor) ~= 62 -- ">"
  if nested and state[5] then return tonumber(state[5]) end
  if not state[5] or proposed and not writes then return current_token() end
  local token = proposed and current_token() or readers_token(state[5])
  if token ~= tonumber(state[5]) then redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token)) end
  return token
end

-- One reader more, and nobody writes or waits.
local readers, crowd = tonumber(state[2]) or 0, tonumber(ARGV[7] or 10000)
if keys == 1 and readers > 0 and readers < crowd and not (state[1] or state[3] or state[4]) then
  local token = known_token()
  redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. attempt, 'readers', readers + 1)
  if pttl < ttl_ms then redis.call('PEXPIREAT', KEYS[1], ends) end
  return token
end

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
local heir, its_owner = string.match(waiter, '^(%S+) [1-9]%d?%d?%d?%d? (%S+) %S*$')
if waiter ~= '' and (heir ~= attempt or its_owner ~= owner) then return -5 end
local waiting = redis.call('ZCARD', KEYS[3])
--@include unexpired

--@include has

--@include count

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include expand_sole_hold

--@include is_foreign

if not (state[1] or state[2] or state[6]) and is_foreign() then return -2 end
if state[6] then
  unfold()
  state = look()
  readers = tonumber(state[2]) or 0
end
if waiting > 0 and not live(state[1]) and (readers == 0 or state[1]) then
  let_in()
  state = look()
end

local write_ends, write = live(state[1])
local writes = write and string.match(write, '^%S+')
local read_ends, attempts = live(state[4])
readers = tonumber(state[2]) or 0

-- Readers who are dead do not count: where there seem to be too many, those of a sample are removed.
local function is_crowded(queued)
  if readers + queued < crowd then return false end
  local sample, over = redis.call('HRANDFIELD', KEYS[1], 128, 'WITHVALUES'), {}
  for i = 1, #sample, 2 do
    if string.sub(sample[i], 1, 5) == 'read:' and not live(sample[i + 1]) then over[#over + 1] = sample[i] end
  end
  if over[1] then readers = redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(over))) end
  state = look()
  return readers + queued >= crowd
end

local function queue()
  if waiter == '' then return end
  if redis.call('ZSCORE', KEYS[3], waiter) == false and is_crowded(redis.call('ZCARD', KEYS[3])) then return -7 end
  local since = tonumber(ARGV[9]) or time
  redis.pcall('ZADD', KEYS[3], 'NX', string.format('%.0f', since - 4503599627370496), waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
end

if read_ends then
  if not has(attempts, attempt) then
    if count(attempts) >= tonumber(ARGV[5]) then return -4 end
    attempts = attempts .. ' ' .. attempt
  end
  ends = math.max(ends, read_ends)
elseif writes and writes ~= owner then
  return queue() or {write_ends - now, time}
else
  local gate = tonumber(state[3]) or 0
  if not writes and gate > now then
    -- A writer waits. Who queued before the last one left goes first all the same.
    local queued = waiter ~= '' and redis.call('ZSCORE', KEYS[3], waiter)
    local phase = redis.call('HGET', KEYS[1], 'phase')
    if not (queued and phase and queued + 4503599627370496 <= tonumber(phase)) then
      return queue() or {gate - now, time}
    end
  end
  if is_crowded(0) then return -7 end
  attempts = attempt
end

local token = known_token(writes)
if state[1] and not write then redis.call('HDEL', KEYS[1], 'write') end
if state[3] and tonumber(state[3]) <= now then redis.call('HDEL', KEYS[1], 'gate') end
if not state[4] then readers = readers + 1 end
redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. attempts, 'readers', readers)
keep_until(ends)
if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end
let_in()
return token
