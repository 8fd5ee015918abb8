-- Queues the attempt at a place; or, if it polls, notes that it was seen, which counts for one
-- claim. A poll also removes marks that have expired, and some dead waiters, wherever they are in
-- the queue.
local function queue(at, lane)
  if not claim then return end
  local added = redis.call('ZADD', KEYS[3], 'NX', at + lane, waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
  if added == 1 and at == time then return end
  redis.call('ZADD', KEYS[3], 2^52 + time + claim * 1000, 'seen ' .. attempt)
  if added == 1 then return end
  --@include sweep
end
