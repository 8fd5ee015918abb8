-- Readers get the token of the last writer, unless it is below min_token: others may have had
-- larger ones then.
local function new_read_token(known)
  local last = known or redis.pcall('GET', KEYS[2])
  if type(last) == 'table' then return nil, last end
  local token = to_token(last)
  if token and token >= (minimum or 0) then return token end
  return next_token()
end
