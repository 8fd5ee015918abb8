-- Readers get the token of the last writer, unless it is below min_token: others may have had
-- larger ones then.
local function readers_token(known)
  local token = tonumber(known or redis.call('GET', KEYS[2]) or nil)
  if token and token >= (least or 0) and token < 2^53 then return token end
  return next_token()
end
