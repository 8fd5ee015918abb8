-- rwlock/write_acquire.lua: write, write once more, or queue to write.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     the token must be larger than this; of a quorum "=N": it is N, "~N": N once more,
--                    ">N": N, also if the owner has a hold with an earlier one; empty: none
-- ARGV[5]  limit     how many holds the owner may have to write
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent or empty: do not queue
-- ARGV[7]  crowd     ignored: one owner writes
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond that is the same on all nodes of a quorum; absent: now
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -6             refused: the owner reads, and another reader waits to write: each would wait for the other
--          {-8, highest}  refused: a token is proposed that is not larger than the largest accepted before
--          -9             refused: this node of a guarded quorum was not admitted since it started or lost its data
--
-- Busy: somebody else writes or reads. Queued, it keeps new readers out for claim_ms after each poll.
-- A further hold of the same owner keeps the token. An owner who reads is granted once he is the only reader.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
local hold_of = owner .. ' ' .. attempt
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(hold_of, '^%S+ %S+$')) then
  return -5
end

--@include proposal

--@include restart_guard

--@include next_token

--@include readers_token

-- The common case: nobody is there. On one server, the token is the next one.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])
if keys == 0 and not proposed then
  local token = floor ~= '' and next_token() or 0
  redis.call('HSET', KEYS[1], 'sole', (floor ~= '' and 'write ' or 'unfenced ') .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include largest_accepted

--@include accept

--@include obstacle

--@include own_token

if keys == 0 then
  local blocked = obstacle()
  if blocked and not mends then return {-8, blocked} end
  local token = blocked and 0 or accept(proposed)
  redis.call('HSET', KEYS[1], 'sole', (token > 0 and 'write ' or 'unfenced ') .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local ends = now + ttl_ms

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
local heir, claim_ms, its_owner = string.match(waiter, '^(%S+) ([1-9]%d?%d?%d?%d?) (%S+) %S*$')
if waiter ~= '' and (heir ~= attempt or its_owner ~= owner) then return -5 end
local waiting = redis.call('ZCARD', KEYS[3])
--@include unexpired

--@include has

--@include count

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include other_reader

--@include expand_sole_hold

local function look()
  return redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner, 'upgrade', 'gate')
end
local state = look()
if state.err then return -2 end
if redis.call('PTTL', KEYS[1]) == -1 then return -3 end
--@include is_foreign

if not (state[1] or state[2] or redis.call('HEXISTS', KEYS[1], 'sole') == 1) and is_foreign() then return -2 end
unfold()
state = look()
-- A late delivery of what was downgraded since: it reads, and must not begin to write again.
local _, reads_by = live(state[3])
if reads_by and has(reads_by, attempt) then return tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) end
local function others_read()
  return (tonumber(state[2]) or 0) > (state[3] and 1 or 0)
end
local other_ends
if not live(state[1]) then
  other_ends = others_read() and other_reader()
  state = look()
  if waiting > 0 and not other_ends and not live(state[3]) then
    let_in()
    state = look()
    other_ends = others_read() and now + math.max(redis.call('PTTL', KEYS[1]), 1)
  end
end

local reads = live(state[3])
local write_ends, write = live(state[1])
local writes, attempts = string.match(write or '', '^(%S+) (.+)$')
local function hold(words)
  redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. owner .. ' ' .. words)
  keep_until(ends)
  if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end
end
if writes == owner then
  if not has(attempts, attempt) then
    if count(attempts) >= tonumber(ARGV[5]) then return -4 end
    attempts = attempts .. ' ' .. attempt
  end
  ends = math.max(ends, write_ends)
  local alone = proposed and (attempts == attempt or string.byte(floor) == 62) -- ">"
  if alone and obstacle(true) then return {-8, obstacle(true)} end
  local known = not alone and redis.call('HGET', KEYS[1], 'fence')
  -- Nested in a hold without a token, it has none either: no node may be asked to accept one then.
  local token = tonumber(known or floor ~= '' and (alone or not proposed) and own_token() or 0)
  hold(attempts)
  if token > 0 then redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token)) end
  if state[5] and not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
  return token
end

if write or other_ends then
  if waiter ~= '' then
    local upgrades = not write and reads
    local _, upgrader = live(state[4])
    if upgrades and upgrader and upgrader ~= owner and live(redis.call('HGET', KEYS[1], 'read:' .. upgrader)) then
      return -6
    end
    if upgrades then
      redis.pcall('ZADD', KEYS[3], 0, waiter) -- before all other writers: they wait for this reader
    else
      redis.pcall('ZADD', KEYS[3], 'NX', string.format('%.0f', tonumber(ARGV[9]) or time), waiter)
    end
    redis.call('PEXPIRE', KEYS[3], 60000)
    redis.call('HSET', KEYS[1], 'gate', math.max(now + claim_ms, tonumber(state[5]) or 0))
    if upgrades then redis.call('HSET', KEYS[1], 'upgrade', now + claim_ms .. ' ' .. owner) end
  end
  return {(write_ends or other_ends) - now, time}
end

local blocked = obstacle()
if blocked and not mends then return {-8, blocked} end
local token = floor ~= '' and not blocked and own_token() or 0
hold(attempt)
if token > 0 then
  redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token))
else
  redis.call('HDEL', KEYS[1], 'fence')
end
local _, upgrader = live(state[4])
if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate', 'upgrade') end
return token
