-- The proposal, or the largest accepted token: larger than the tokens of all writers before.
local function take_token(proposal)
  if proposal == '' then return 0 end
  local proposed, highest = tonumber(proposal), accepted()
  if not highest then return nil end
  if proposed > highest then return accept(proposed, proposal) end
  return accept(highest)
end
