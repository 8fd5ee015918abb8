-- quorum/mutex_acquire_many: acquires those of many mutexes that are free and have no waiter, on
-- one node of a quorum.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in mutex_acquire, for all locks
-- ARGV[2]  token_ttl_ms   as in mutex_acquire, for all locks; empty: 3600000
-- ARGV[3]  attempt        as in mutex_acquire
-- ARGV[4]  proposal       as in mutex_acquire; empty: no token. Then the attempt and the proposal
--                         of the next lock
--
-- Returns  {answer...}    for each lock the token as in mutex_acquire, or -10: nothing was
--                         changed, send mutex_acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired. A guarded quorum sends
-- mutex_acquire for each lock.
local ttl_ms, token_ttl_ms = ARGV[1], ARGV[2]
--@include check_ttl
--@include check_token_ttl
local count = #KEYS / 3
local arguments = 2 + 2 * count
--@include check_count
local instant = redis.call('TIME')
local latest = (instant[1] + 86400) * 1000000
for i = 1, count do
  local attempt, proposal = ARGV[1 + 2 * i], ARGV[2 + 2 * i]
  --@include check_attempt
  --@include check_one_proposal
end

--@include many_locks

--@include accept_proposal

--@include require_larger_proposal

--@include grant_mutex

--@include is_free

--@include are_free

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local token
  if are_free or is_free(ARGV[1 + 2 * i]) then token = take_token(ARGV[2 + 2 * i]) end
  if token then grant(ARGV[1 + 2 * i], nil, nil, ttl_ms) end
  answers[i] = token or -10
end
return answers
