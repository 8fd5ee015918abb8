-- rwlock/read_acquire: acquires the lock to read, or queues for it.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every hold, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  owner          up to 256 bytes, no space, not beginning with ":"; default: the attempt
-- ARGV[4]  min_token      below 2^52: the token is at least this; default: no token
-- ARGV[5]  claim_ms       1 to 60000: queue if the lock is busy; default: do not queue
-- ARGV[6]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[7]  max_depth      1 to 1024: how many holds to read the owner may have; default: 255
-- ARGV[8]  queued_at      below 2^52: its place, the time of its first busy answer; default: now
-- ARGV[9]  grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[10] token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
-- ARGV[11] max_readers    1 to 100000: how many may read or wait; default: 10000
--
-- Returns  token          granted: that of the last writer, or a larger one; 0: without a token
--          {pttl, time}   busy: poll again in pttl ms at most; the server's clock in microseconds
--          -1             refused: the attempt was ended, or comes too late
--          -2             refused: the key holds something else
--          -3             refused: the key has no TTL
--          -4             refused: the owner has max_depth holds to read
--          -5             refused: an argument is malformed
--          -7             refused: max_readers read or wait
--
-- Busy: another owner writes, or waits to write; an owner that holds the lock need not wait for the
-- latter. A second delivery grants nothing more, and the hold lasts longer by as little as the
-- deliveries are apart.
local attempt, ttl_ms, owner, min_token, claim_ms, channel, max_depth, queued_at, grant_before,
  token_ttl_ms, max_readers = unpack(ARGV)
local kind = 'read'
--@include check_acquire
--@include check_min_token
--@include check_optional_owner
--@include check_depth
--@include check_max_readers

--@include next_token

--@include to_token

--@include new_read_token

-- The common case: the lock is free, and no attempt waits.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3])
if keys == 0 then
  local token, refusal = 0, nil
  if min_token then token, refusal = new_read_token() end
  if not token then return refusal end
  --@include sole_read
  return token
end

--@include clock_ms

--@include read_state

--@include refuse_min_token

--@include nested_read_token

--@include read_acquire
