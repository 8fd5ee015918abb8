-- rwlock/write_acquire: acquires the lock to write, or queues for it.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every hold, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  owner          up to 256 bytes, no space, not beginning with ":"; default: the attempt
-- ARGV[4]  min_token      below 2^52: the token is larger than this; default: no token
-- ARGV[5]  claim_ms       1 to 60000: queue if the lock is busy; default: do not queue
-- ARGV[6]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[7]  max_depth      1 to 1024: how many holds to write the owner may have; default: 255
-- ARGV[8]  queued_at      below 2^52: its place, the time of its first busy answer; default: now
-- ARGV[9]  grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[10] token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
--
-- Returns  token          granted; 0: without a token
--          {pttl, time}   busy: poll again in pttl ms at most; the server's clock in microseconds
--          -1             refused: the attempt was ended, or comes too late
--          -2             refused: the key holds something else
--          -3             refused: the key has no TTL
--          -4             refused: the owner has max_depth holds to write
--          -5             refused: an argument is malformed
--          -6             not queued: the owner reads, and another reader waits to write: each
--                         would wait for the other
--
-- Busy: another owner writes or reads. While it waits, new readers stay out, for claim_ms after
-- each poll. A nested hold has the token of the first one.
--
-- An owner that reads is granted the lock once it is the only reader. A second delivery grants
-- nothing more, and the hold lasts longer by as little as the deliveries are apart.
local attempt, ttl_ms, owner, min_token, claim_ms, channel, max_depth, queued_at, grant_before,
  token_ttl_ms = unpack(ARGV)
local kind = 'write'
--@include check_acquire
--@include check_min_token
--@include check_optional_owner
--@include check_depth

--@include next_token

-- The common case: the lock is free, and no attempt waits.
if not place and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token, refusal = 0, nil
  if min_token then token, refusal = next_token() end
  if not token then return refusal end
  --@include sole_write
  return token
end

--@include clock_ms

--@include read_state

--@include refuse_min_token

--@include to_token

--@include tokens

--@include new_read_token

--@include write_acquire
