local proposed, minimum = nil, nil
if proposal and proposal ~= '' then
  local instant = redis.call('TIME')
  proposed = string.find(proposal, '^[1-9]%d*$') and tonumber(proposal)
  if not proposed or proposed > (instant[1] + 86400) * 1000000 then return -5 end
end
if purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair' then return -5 end
