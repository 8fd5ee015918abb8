-- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to no
-- other one: a release publishes with the rights of its own user, for whatever was queued.
local claim
if claim_ms and claim_ms ~= '' then
  claim = #claim_ms <= 5 and string.find(claim_ms, '^[1-9]%d*$') and tonumber(claim_ms)
  if not claim or claim > 60000 then return -5 end
end
if channel and channel ~= '' then
  local word = string.find(channel, 'wake:', -38, true)
  if not word or not string.find(channel, '^%x+~?$', word + 5) or #channel > 256
    or string.find(channel, ' ', 1, true) then
    return -5
  end
end
