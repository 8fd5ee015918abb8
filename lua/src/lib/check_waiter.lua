local claim
if claim_ms and claim_ms ~= '' then
  claim = #claim_ms <= 5 and string.find(claim_ms, '^[1-9]%d*$') and tonumber(claim_ms)
  if not claim or claim > 60000 then return -5 end
end
if channel and channel ~= '' then
  --@include is_channel
  if not is_channel(channel) or #channel > 256 or string.find(channel, ' ', 1, true) then return -5 end
end
