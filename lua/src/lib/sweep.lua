--@include waiter
redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
local some = redis.call('ZRANDMEMBER', KEYS[3], 16, 'WITHSCORES')
for i = 1, #some, 2 do
  local score = tonumber(some[i + 1])
  if score < 2^52 then
    local its_attempt, _, ms = parse(some[i])
    if not (its_attempt and is_alive(its_attempt, score, ms)) then redis.call('ZREM', KEYS[3], some[i]) end
  end
end
