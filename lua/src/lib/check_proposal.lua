local proposed, least = nil, nil
if proposal and proposal ~= '' then
  local instant = redis.call('TIME')
  proposed = tonumber(proposal)
  if not (proposed and proposed >= 1 and proposed % 1 == 0 and proposed <= (instant[1] + 86400) * 1000000) then
    return -5
  end
end
if purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair' then return -5 end
