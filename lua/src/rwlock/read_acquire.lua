-- rwlock/read_acquire.lua: read, read once more, or queue to read.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     a new token must be larger than this number; empty: no token
-- ARGV[5]  limit     how many holds the owner may have to read
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     how many may read or wait at a time; absent: 10000
--
-- Returns  token          granted: that of the last writer; 0 without fencing
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -7             refused: so many read or wait already
--
-- Busy: another owner writes, or waits to write. An owner that holds the lock does not wait for a
-- waiting writer.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
--@include hold_arguments
--@include plain_floor

--@include next_token

--@include readers_token

-- The common case: the lock is free, and nothing waits for it.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])
if keys == 0 then
  local token = floor ~= '' and readers_token() or 0
  redis.call('HSET', KEYS[1], 'sole', 'read ' .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local queued_at = time
--@include read_state

-- That of the last writer, from the hash if there is one.
local function known_token(writes)
  if floor == '' then return 0 end
  if writes and state[5] then return tonumber(state[5]) end
  local token = readers_token(state[5])
  if state[5] and token ~= tonumber(state[5]) then
    redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token))
  end
  return token
end

--@include read_or_queue
