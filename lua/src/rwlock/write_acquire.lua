-- rwlock/write_acquire.lua: write, write once more, or queue to write.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     the token must be larger than this number; empty: no token
-- ARGV[5]  limit     how many holds the owner may have to write
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     ignored: one owner writes
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -6             refused: the owner and another reader both wait to write: a deadlock
--
-- Busy: another owner writes or reads. Queued, it keeps new readers out for claim_ms after a poll.
-- A further hold of the same owner keeps the token. An owner that reads is granted the lock once it
-- is the only reader.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
--@include hold_arguments
--@include plain_floor

--@include next_token

--@include readers_token

-- The common case: the lock is free, and nothing waits for it.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local token = floor ~= '' and next_token() or 0
  redis.call('HSET', KEYS[1], 'sole', (floor ~= '' and 'write ' or 'unfenced ') .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local queued_at = time
--@include write_or_queue

local known = nested and redis.call('HGET', KEYS[1], 'fence')
local token = tonumber(known or floor ~= '' and next_token() or 0)
--@include grant_write
