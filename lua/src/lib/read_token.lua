-- The token of a hold to read: inside a hold to write, that of the latter.
local function read_token(writes)
  if not min_token then return 0 end
  if writes and (tonumber(state.token) or 0) > 0 then return tonumber(state.token) end
  return readers_token(state.token)
end
