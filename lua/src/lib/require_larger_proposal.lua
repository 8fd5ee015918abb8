-- The proposal, if it is larger than all that this node has accepted.
local function take_token(proposal)
  if proposal == '' then return 0 end
  local proposed, highest = tonumber(proposal), accepted()
  return highest and proposed > highest and accept(proposed, proposal) or nil
end
