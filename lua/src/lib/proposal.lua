-- Of a quorum, whose nodes must agree on a token: one is proposed. More than a day ahead is a mistake.
local proposed
if (string.byte(floor) or 0) > 57 then
  proposed = tonumber(string.match(floor, '^[=~>](%d+)$') or '')
  if not proposed or proposed > (redis.call('TIME')[1] + 86400) * 1000000 then return -5 end
end
