if ended_ms > 0 then
  local before = redis.call('GET', KEYS[4])
  if before then return tonumber(before) or 0 end
end
