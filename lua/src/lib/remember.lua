-- A second delivery gets the first answer for a minute, and changes nothing. The mark is the
-- second until which it counts, in microseconds; its last six digits are the answer plus 10. ZREM
-- comes first, since a full server refuses ZADD as the first write of a script, and must not keep
-- a lock.
local function answer(number)
  if remember then
    redis.call('ZREM', KEYS[3], 'ended ' .. attempt)
    redis.call('ZADD', KEYS[3], 2^52 + (clock[1] + 60) * 1000000 + number + 10, 'ended ' .. attempt)
    redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
    -- In a cluster every release leaves a mark. Above 20,000, each one removes the 100 oldest.
    local last = 2^52 + (clock[1] + 61) * 1000000
    if redis.call('ZCOUNT', KEYS[3], 2^52, last) > 20000 then
      redis.call('ZREM', KEYS[3], unpack(redis.call('ZRANGEBYSCORE', KEYS[3], 2^52, last, 'LIMIT', 0, 100)))
    end
    if redis.call('PTTL', KEYS[3]) < 60000 then redis.call('PEXPIRE', KEYS[3], 60000) end
  end
  return number
end

if remember then
  local mark = tonumber(redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt))
  if mark and mark > 2^52 + time then return (mark - 2^52) % 1000000 - 10 end
end
