-- The token of a hold to read: inside a hold to write, that of the latter.
local function nested_read_token(writes)
  if not min_token then return 0 end
  local token = writes and to_token(state.token)
  if token and token > 0 then return token end
  return new_read_token(state.token)
end
