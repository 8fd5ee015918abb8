-- The number of waiters that one script checks is bounded. While there are more of them, the lock
-- is busy, so that nothing overtakes those behind.
local checks_left, is_unfinished = 128, false

-- The writer that has waited longest and is alive. Dead ones before it leave the queue, other kinds
-- keep their places.
local function first_writer()
  local others = 0
  while checks_left > 0 do
    checks_left = checks_left - 1
    local first =
      redis.pcall('ZRANGEBYSCORE', KEYS[3], 0, '(4503599627370496', 'WITHSCORES', 'LIMIT', others, 1)
    if not first[1] then return nil end
    local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner = parse(first[1])
    if waiter_attempt and is_alive(waiter_attempt, tonumber(first[2]), ms) then
      if waiter_kind == 'write' then
        if waiter_owner == '' then waiter_owner = waiter_attempt end
        return first[1], waiter_attempt, ms, waiter_channel, waiter_owner, tonumber(first[2])
      end
      others = others + 1
    else
      redis.call('ZREM', KEYS[3], first[1], 'seen ' .. (waiter_attempt or ''))
    end
  end
  is_unfinished = true
end

-- False also if there are too many waiters to check: new readers must then stay out.
local function no_writer_waits()
  return not first_writer() and not is_unfinished
end
