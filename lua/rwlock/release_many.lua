-- rwlock/release_many: generated from its source in lua/src, do not edit.
-- rwlock/release_many: releases those of many read-write locks that have one hold and no waiter.
--
-- KEYS[1]  lock      hash: the holds, with a TTL. Then the key of the next lock, for at most 128
--                    locks
-- ARGV[1]  attempt   as in read_acquire
-- ARGV[2]  owner     as in read_acquire; empty: the attempt. Then the attempt and the owner of the
--                    next lock
--
-- Returns  {answer...}   for each lock 1: released; or -10: nothing was changed, send release for
--                        this lock
--          -5            refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one released.
local count = #KEYS
local arguments = 2 * count
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
local sole = {}
for i = 1, count do
  local attempt, owner = ARGV[2 * i - 1], ARGV[2 * i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
  if not owner or owner == '' then
    owner = attempt
  elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
    return -5
  end
  sole[i] = owner .. ' ' .. attempt
end

-- The fragments act on the keys of one lock at a time.
local keys, KEYS = KEYS, {}

local answers = {}
for i = 1, count do
  KEYS[1] = keys[i]
  local mode = redis.pcall('HGET', KEYS[1], 'mode')
  answers[i] = -10
  -- An attempt that waits turns the only hold into one of several.
  if mode == 'sole read ' .. sole[i] or mode == 'sole write ' .. sole[i] then
    redis.call('DEL', KEYS[1])
    answers[i] = 1
  end
end
return answers
