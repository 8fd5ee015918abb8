-- quorum/reentrant_acquire: acquires the lock, acquires it once more, or queues for it, on one
-- node of a quorum.
--
-- KEYS[1]  lock           hash: the owner and its count, `mode`, and `:<attempt>` for each hold
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- KEYS[4]  node           hash: the admission of this node to a guarded quorum; default: no guard
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every hold, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  owner          up to 256 bytes, no space, not beginning with ":"
-- ARGV[4]  proposal       1 to a day ahead of the clock in microseconds: the token to accept;
--                         default: no token
-- ARGV[5]  purpose        nested: also inside a hold with another token; repair: the token of a
--                         lease that is held elsewhere; default: a new lease
-- ARGV[6]  claim_ms       1 to 60000: queue if the lock is busy; default: do not queue
-- ARGV[7]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[8]  max_depth      1 to 1024: how many holds the owner may have; default: 255
-- ARGV[9]  queued_at      below 2^52: its place, the same on all nodes; default: now
-- ARGV[10] grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[11] token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
-- ARGV[12] run            with KEYS[4], the run id of this server; default: no guard
--
-- Returns  token           granted; 0: without a token
--          {pttl, time}    busy: free in at most pttl ms; the server's clock in microseconds
--          -1              refused: the attempt was ended, or comes too late
--          -2              refused: the key holds something else
--          -3              refused: the key has no TTL
--          -4              refused: the owner has max_depth holds
--          -5              refused: an argument is malformed
--          {-8, highest}   refused: the proposal is not larger than this token, which the node has
--                          accepted
--          -9              refused: the node was not admitted since it started or lost its data
--
-- The rest is as on one server: reentrant/acquire.
local attempt, ttl_ms, owner, proposal, purpose, claim_ms, channel, max_depth, queued_at, grant_before,
  token_ttl_ms, run = unpack(ARGV)
local kind = 'reentrant'
--@include check_acquire
--@include check_proposal
--@include check_owner
--@include check_depth

--@include restart_guard

--@include proposals

--@include proposed_token

-- The common case: the lock is free, and no attempt waits.
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token, refusal = take_token()
  if not token then return refusal end
  --@include hold_reentrant
  return token
end

--@include next_token

--@include clock

--@include reentrant_busy

--@include reentrant_acquire
