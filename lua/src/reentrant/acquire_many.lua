-- reentrant/acquire_many: acquires those of many re-entrant locks that are free and have no waiter.
--
-- KEYS[1]  lock           hash: owner to count, mode, attempts, with a TTL
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in acquire, for all locks
-- ARGV[2]  min_token      as in acquire, for all locks; empty: no token
-- ARGV[3]  token_ttl_ms   as in acquire, for all locks; empty: 3600000
-- ARGV[4]  attempt        as in acquire
-- ARGV[5]  owner          as in acquire. Then the attempt and the owner of the next lock
--
-- Returns  {answer...}    for each lock the token as in acquire, or -10: nothing was changed, send
--                         acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired.
local ttl_ms, min_token, token_ttl_ms = ARGV[1], ARGV[2], ARGV[3]
--@include check_ttl
--@include check_min_token
--@include check_token_ttl
local count = #KEYS / 3
local arguments = 3 + 2 * count
--@include check_count
for i = 1, count do
  local attempt, owner = ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  --@include check_attempt
  --@include check_owner
end

--@include many_locks

--@include next_token

--@include is_free

--@include are_free

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local attempt, owner, token = ARGV[2 + 2 * i], ARGV[3 + 2 * i], nil
  if are_free or is_free(attempt) then token = not min_token and 0 or next_token() end
  if token then
    --@include hold_reentrant
  end
  answers[i] = token or -10
end
return answers
