-- quorum/write_acquire_many: acquires those of many read-write locks to write that are free and
-- have no waiter, on one node of a quorum.
--
-- KEYS[1]  lock           hash: the holds, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in write_acquire, for all locks
-- ARGV[2]  token_ttl_ms   as in write_acquire, for all locks; empty: 3600000
-- ARGV[3]  attempt        as in write_acquire
-- ARGV[4]  owner          as in write_acquire; empty: the attempt
-- ARGV[5]  proposal       as in write_acquire; empty: no token. Then the attempt, the owner
--                         and the proposal of the next lock
--
-- Returns  {answer...}    for each lock the token as in write_acquire, or -10: nothing was
--                         changed, send write_acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired. A guarded quorum sends
-- write_acquire for each lock.
--@include proposals_by_owner

--@include require_larger_proposal

--@include are_free

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local attempt, owner, token = ARGV[3 * i], owners[i], nil
  if are_free or redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then token = take_token(ARGV[2 + 3 * i]) end
  if token then
    --@include sole_write
  end
  answers[i] = token or -10
end
return answers
