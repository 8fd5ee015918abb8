--@include remove_dead

-- Queues the attempt at a place; or, if it polls, notes that it was seen, which counts for one
-- claim. A poll also removes marks that have expired, and some dead waiters, wherever they are in
-- the queue. So does a new waiter of a long queue, since clients that crash in a loop never poll.
-- `scores` are those that were just read, if nothing was removed since.
local function queue(at, lane, scores)
  if not claim then return end
  local is_queued = scores and scores[2]
  local added = is_queued and 0 or redis.call('ZADD', KEYS[3], 'NX', at + lane, waiter)
  -- The score is above all end marks, so that the oldest of those are found first.
  local mark = 2^52 + 61000000 + time + claim * 1000
  local polls = added == 0 or at ~= time
  if polls then redis.call('ZADD', KEYS[3], mark, 'seen ' .. attempt) end
  -- The queue is kept for a minute. For usual claims, one poll in ten seconds suffices for that.
  -- ZADD comes first: a full server refuses it only as the first write of a script.
  local last_mark = is_queued and tonumber(scores[3])
  local is_kept = last_mark and claim <= 30000 and math.floor(last_mark / 10^7) == math.floor(mark / 10^7)
  if not is_kept then redis.call('PEXPIRE', KEYS[3], '60000') end
  if polls and redis.call('ZCARD', KEYS[3]) == 2 then return end -- this waiter and its mark
  if added == 1 and redis.call('ZCOUNT', KEYS[3], '-inf', '(4503599627370496') < 128 then return end
  remove_dead(added == 1 and 2 or 16)
end
