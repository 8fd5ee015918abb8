-- mutex/acquire: acquires the mutex, or queues for it.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every lease, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  min_token      below 2^52: the token is larger than this; default: no token
-- ARGV[4]  claim_ms       1 to 60000: queue if the mutex is busy; default: do not queue
-- ARGV[5]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[6]  queued_at      below 2^52: its place, the time of its first busy answer; default: now
-- ARGV[7]  grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[8]  token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
--
-- Returns  token          granted; 0: without a token
--          {pttl, time}   busy: free in at most pttl ms; the server's clock in microseconds
--          -1             refused: the attempt was ended, or comes too late
--          -2             refused: the key holds something else
--          -3             refused: the key has no TTL
--          -5             refused: an argument is malformed
--
-- A second delivery gets the same token, and grants nothing more.
local attempt, ttl_ms, min_token, claim_ms, channel, queued_at, grant_before, token_ttl_ms = unpack(ARGV)
local kind = 'mutex'
--@include check_acquire
--@include check_min_token

--@include next_token

-- The common case: the mutex is free, and no attempt waits.
if not place and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token, refusal = 0, nil
  if min_token then token, refusal = next_token() end
  if not token then return refusal end
  redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
  return token
end

--@include clock

--@include refuse_min_token

--@include mutex_busy

--@include to_token

--@include tokens

--@include mutex_acquire
