-- mutex/release_many: releases those of many mutexes that have no waiter.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  waiters   zset: waiters by their places, and marks. Then the keys of the next lock, for
--                    at most 128 locks
-- ARGV[1]  attempt   as in acquire. Then that of the next lock
--
-- Returns  {answer...}   for each lock 1: released; or -10: nothing was changed, send release for
--                        this lock
--          -5            refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one released.
local count = #KEYS / 2
local arguments = count
--@include check_count
for i = 1, count do
  local attempt = ARGV[i]
  --@include check_attempt
end

--@include many_locks

--@include has_waiter

--@include may_wait

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2] = keys[2 * i - 1], keys[2 * i]
  answers[i] = -10
  if redis.pcall('GET', KEYS[1]) == ARGV[i] and not (may_wait and has_waiter()) then
    redis.call('DEL', KEYS[1])
    answers[i] = 1
  end
end
return answers
