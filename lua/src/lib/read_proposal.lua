-- The token of a hold to read: the proposal, or the largest accepted token. It is larger than the
-- tokens of all writers before and, once a majority knows it, smaller than those of all after.
-- Inside a hold to write, it is that of the latter.
local function nested_read_token(writes)
  local token = writes and purpose ~= 'nested' and to_token(state.token)
  local refusal = proposed and not token and refuse_proposal(true)
  if refusal and refusal.err then return nil, refusal end
  note_lease()
  if not proposed then return 0 end
  return token or accept(math.max(proposed, highest))
end
