-- quorum/write_acquire.lua: write on one node of a quorum, write once more, or queue to write.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the largest accepted token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     "=N": the proposed token N; ">N": the same, also if the owner has a hold with
--                    an earlier one; "~N": repair, with the token N of the lease; N: the token
--                    must be larger; empty: no token
-- ARGV[5]  limit     how many holds the owner may have to write
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     ignored: one owner writes
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond, the same on all nodes; absent: now
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -6             refused: the owner and another reader both wait to write: a deadlock
--          {-8, highest}  refused: the proposed token is not larger than this accepted one
--          -9             refused: the node was not admitted since it started or lost its data
--
-- Busy: another owner writes or reads. Queued, it keeps new readers out for claim_ms after a poll.
-- A further hold of the same owner keeps the token. An owner that reads is granted the lock once it
-- is the only reader.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
--@include hold_arguments

--@include proposal

--@include restart_guard

--@include next_token

--@include readers_token

--@include largest_accepted

--@include accept

--@include obstacle

--@include own_token

-- The common case: the lock is free, and nothing waits for it.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local blocked = obstacle()
  if blocked and not mends then return {-8, blocked} end
  local token = floor ~= '' and not blocked and own_token() or 0
  redis.call('HSET', KEYS[1], 'sole', (token ~= 0 and 'write ' or 'unfenced ') .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local queued_at = tonumber(ARGV[9]) or time
--@include write_or_queue

-- A nested hold keeps the token of the outer one, except with ">".
local proposes = proposed and (not nested or attempts == attempt or string.byte(floor) == 62) -- ">"
local blocked = proposes and obstacle(nested)
if blocked and (nested or not mends) then return {-8, blocked} end
local known = nested and not proposes and redis.call('HGET', KEYS[1], 'fence')
-- Nested in a hold without a token, it has none either: no node may be asked to accept one then.
local accepts = floor ~= '' and not blocked and (proposes or not proposed)
local token = tonumber(known or accepts and own_token() or 0)
--@include grant_write
