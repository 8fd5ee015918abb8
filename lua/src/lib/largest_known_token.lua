-- The proposal, or the largest accepted token: larger than the tokens of all writers before.
local function take_token(proposal)
  if proposal == '' then return 0 end
  local highest = accepted()
  return highest and accept(math.max(tonumber(proposal), highest)) or nil
end
