-- Every argument is checked on every path, before the first write.
--@include check_attempt
--@include check_ttl
--@include check_waiter
--@include check_token_ttl
local place
if queued_at and queued_at ~= '' then
  place = string.find(queued_at, '^[1-9]%d*$') and tonumber(queued_at)
  if not place or place >= 2^52 then return -5 end
end
if grant_before and grant_before ~= '' then
  local instant = string.find(grant_before, '^%d+$') and redis.call('TIME')
  if not instant then return -5 end
  if instant[1] * 1000000 + instant[2] >= tonumber(grant_before) then return -1 end
end
