-- The text by which an attempt is queued.
local function waiter_for(waiter_kind, waiter_owner, waiter_depth)
  if not claim then return '' end
  return attempt .. ' ' .. waiter_kind .. ' ' .. claim_ms .. ' ' .. (channel or '') .. ' '
    .. waiter_owner .. waiter_depth
end
