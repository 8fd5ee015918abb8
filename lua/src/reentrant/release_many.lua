-- reentrant/release_many: releases those of many re-entrant locks that have no waiter and no other
-- hold.
--
-- KEYS[1]  lock      hash: owner to count, mode, attempts, with a TTL
-- KEYS[2]  waiters   zset: waiters by their places, and marks. Then the keys of the next lock, for
--                    at most 128 locks
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  owner     as in acquire. Then the attempt and the owner of the next lock
--
-- Returns  {answer...}   for each lock 1: released; or -10: nothing was changed, send release for
--                        this lock
--          -5            refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one released.
local count = #KEYS / 2
local arguments = 2 * count
--@include check_count
for i = 1, count do
  local attempt, owner = ARGV[2 * i - 1], ARGV[2 * i]
  --@include check_attempt
  --@include check_owner
end

--@include many_locks

--@include has_waiter

--@include may_wait

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2] = keys[2 * i - 1], keys[2 * i]
  local held = redis.pcall('HMGET', KEYS[1], ARGV[2 * i], ':' .. ARGV[2 * i - 1])
  answers[i] = -10
  if held[1] == '1' and held[2] and not (may_wait and has_waiter()) then
    redis.call('DEL', KEYS[1])
    answers[i] = 1
  end
end
return answers
