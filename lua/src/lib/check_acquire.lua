-- Every argument is checked on every path, before the first write.
--@include check_attempt
--@include check_ttl
--@include check_waiter
--@include check_token_ttl
local place
if queued_at and queued_at ~= '' then
  place = tonumber(queued_at)
  if not (place and place >= 1 and place < 2^52 and place % 1 == 0) then return -5 end
end
if grant_before and grant_before ~= '' then
  local latest, instant = tonumber(grant_before), redis.call('TIME')
  if not (latest and latest < 2^53 and latest % 1 == 0) then return -5 end
  if instant[1] * 1000000 + instant[2] >= latest then return -1 end
end
