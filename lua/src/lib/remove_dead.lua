-- Removes marks that have expired, and those of some random waiters that are dead. Of sixteen or
-- more, if a quarter was dead, it looks at further ones, but for less than 5 ms.
local function remove_dead(size)
  --@include waiter
  redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
  for _ = 1, 4 do
    local some, dead = redis.call('ZRANDMEMBER', KEYS[3], size, 'WITHSCORES'), {}
    for i = 1, #some, 2 do
      local score = tonumber(some[i + 1])
      if score < 2^52 then
        local waiter_attempt, _, ms = parse(some[i])
        if not (waiter_attempt and is_alive(waiter_attempt, score, ms)) then dead[#dead + 1] = some[i] end
      end
    end
    if dead[1] then redis.call('ZREM', KEYS[3], unpack(dead)) end
    if size < 16 or #dead * 4 < size then return end
    size = 128
  end
end
