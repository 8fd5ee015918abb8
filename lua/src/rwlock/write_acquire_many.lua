-- rwlock/write_acquire_many: acquires those of many read-write locks to write that are free and
-- have no waiter.
--
-- KEYS[1]  lock           hash: the holds, with a TTL
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in write_acquire, for all locks
-- ARGV[2]  min_token      as in write_acquire, for all locks; empty: no token
-- ARGV[3]  token_ttl_ms   as in write_acquire, for all locks; empty: 3600000
-- ARGV[4]  attempt        as in write_acquire
-- ARGV[5]  owner          as in write_acquire; empty: the attempt. Then the attempt and the owner
--                         of the next lock
--
-- Returns  {answer...}    for each lock the token as in write_acquire, or -10: nothing was
--                         changed, send write_acquire for this lock
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
local owners = {}
for i = 1, count do
  local attempt, owner = ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  --@include check_attempt
  --@include check_optional_owner
  owners[i] = owner
end

--@include many_locks

--@include next_token


--@include are_free

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local attempt, owner, token = ARGV[2 + 2 * i], owners[i], nil
  if are_free or redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then token = not min_token and 0 or next_token() end
  if token then
    --@include sole_write
  end
  answers[i] = token or -10
end
return answers
