-- reentrant/release_many: generated from its source in lua/src, do not edit.
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
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
for i = 1, count do
  local attempt, owner = ARGV[2 * i - 1], ARGV[2 * i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
  -- `mode` is a field of the hash that says its kind.
  if not owner or owner == '' or owner == 'mode' or #owner > 256 or string.byte(owner) == 58
    or string.find(owner, ' ', 1, true) then
    return -5
  end
end

-- The fragments act on the keys of one lock at a time.
local keys, KEYS = KEYS, {}

-- A mark of an ended attempt is no waiter: with one of them, all requests for the lock would be
-- sent alone for a minute.
local function has_waiter()
  if redis.call('EXISTS', KEYS[2]) == 0 then return false end
  local first = redis.pcall('ZRANGE', KEYS[2], '0', '0', 'WITHSCORES')
  return (tonumber(first[2]) or 0) < 2^52
end

-- Whether one of the locks has a queue, so that something may wait for it: one call for all of them
-- takes less time than one for each.
local queues = {}
for i = 2, #keys, 2 do queues[#queues + 1] = keys[i] end
local may_wait = redis.call('EXISTS', unpack(queues)) > 0

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
