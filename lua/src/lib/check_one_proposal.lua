if proposal ~= '' and (not string.find(proposal, '^[1-9]%d*$') or tonumber(proposal) > latest) then
  return -5
end
