-- quorum/mutex_acquire: acquires the mutex, or queues for it, on one node of a quorum.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- KEYS[4]  node           hash: the admission of this node to a guarded quorum; default: no guard
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every lease, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  proposal       1 to a day ahead of the clock in microseconds: the token to accept;
--                         default: no token
-- ARGV[4]  purpose        nested: also inside a hold with another token; repair: the token of a
--                         lease that is held elsewhere; default: a new lease
-- ARGV[5]  claim_ms       1 to 60000: queue if the mutex is busy; default: do not queue
-- ARGV[6]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[7]  queued_at      below 2^52: its place, the same on all nodes; default: now
-- ARGV[8]  grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[9]  token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
-- ARGV[10] run            with KEYS[4], the run id of this server; default: no guard
--
-- Returns  token           granted; 0: without a token
--          {pttl, time}    busy: free in at most pttl ms; the server's clock in microseconds
--          -1              refused: the attempt was ended, or comes too late
--          -2              refused: the key holds something else
--          -3              refused: the key has no TTL
--          -5              refused: an argument is malformed
--          {-8, highest}   refused: the proposal is not larger than this token, which the node has
--                          accepted
--          -9              refused: the node was not admitted since it started or lost its data
--
-- The rest is as on one server: mutex/acquire.
local attempt, ttl_ms, proposal, purpose, claim_ms, channel, queued_at, grant_before, token_ttl_ms, run = unpack(ARGV)
local kind = 'mutex'
--@include check_acquire
--@include check_proposal

--@include restart_guard

--@include proposals

--@include proposed_token

-- The common case: the mutex is free, and no attempt waits.
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token, refusal = take_token()
  if not token then return refusal end
  redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
  return token
end

--@include next_token

--@include clock

--@include mutex_busy

--@include mutex_acquire
