-- The text by which an attempt is queued.
local function waiter_for(its_kind, its_owner, its_depth)
  if not claim then return '' end
  return attempt .. ' ' .. its_kind .. ' ' .. claim_ms .. ' ' .. (channel or '') .. ' ' .. its_owner .. its_depth
end
