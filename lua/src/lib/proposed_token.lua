-- The token of a new lease, or nil and a refusal. A lease that is repaired after larger tokens were
-- accepted has none on this node.
local function take_token()
  local is_repair = purpose == 'repair'
  local refusal = proposed and refuse_proposal(is_repair)
  if refusal and (refusal.err or not is_repair) then return nil, refusal end
  note_lease()
  if refusal or not proposed then return 0 end
  return accept(proposed)
end

-- The token of a hold beside or inside another one of its owner: that of the other one, unless the
-- nodes know different ones ("nested"). An attempt may propose its own token again.
local function hold_token(current, is_only, is_new)
  local accepts = proposed and (is_only or purpose == 'nested')
  local refusal = accepts and refuse_proposal(not is_new)
  if refusal and (refusal.err or purpose ~= 'repair') then return nil, refusal end
  note_lease()
  if accepts and not refusal then return accept(proposed) end
  return proposed and current or 0
end
