-- The token of a hold to read: the proposal, or the largest accepted token. It is larger than the
-- tokens of all writers before and, once a majority knows it, smaller than those of all after.
-- Inside a hold to write, it is that of the latter.
local function read_token(writes)
  note_lease()
  if not proposed then return 0 end
  if writes and purpose ~= 'nested' and state.token then return tonumber(state.token) end
  is_too_low(true)
  return accept(math.max(proposed, highest))
end
