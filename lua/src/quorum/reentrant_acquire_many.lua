-- quorum/reentrant_acquire_many: acquires those of many re-entrant locks that are free and have
-- no waiter, on one node of a quorum.
--
-- KEYS[1]  lock           hash: owner to count, mode, attempts, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in reentrant_acquire, for all locks
-- ARGV[2]  token_ttl_ms   as in reentrant_acquire, for all locks; empty: 3600000
-- ARGV[3]  attempt        as in reentrant_acquire
-- ARGV[4]  owner          as in reentrant_acquire
-- ARGV[5]  proposal       as in reentrant_acquire; empty: no token. Then the attempt, the owner
--                         and the proposal of the next lock
--
-- Returns  {answer...}    for each lock the token as in reentrant_acquire, or -10: nothing was
--                         changed, send reentrant_acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired. A guarded quorum sends
-- reentrant_acquire for each lock.
local ttl_ms, token_ttl_ms = ARGV[1], ARGV[2]
--@include check_ttl
--@include check_token_ttl
local count = #KEYS / 3
local arguments = 2 + 3 * count
--@include check_count
local instant = redis.call('TIME')
local latest = (instant[1] + 86400) * 1000000
for i = 1, count do
  local attempt, owner, proposal = ARGV[3 * i], ARGV[1 + 3 * i], ARGV[2 + 3 * i]
  --@include check_attempt
  --@include check_owner
  --@include check_one_proposal
end

--@include many_locks

--@include accept_proposal

--@include require_larger_proposal

--@include is_free

--@include are_free

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local attempt, owner, token = ARGV[3 * i], ARGV[1 + 3 * i], nil
  if are_free or is_free(attempt) then token = take_token(ARGV[2 + 3 * i]) end
  if token then
    --@include hold_reentrant
  end
  answers[i] = token or -10
end
return answers
