-- Readers get the token of the last writer, unless it is below min_token: others may have had
-- larger ones then.
local function readers_token(known)
  local last = known or redis.pcall('GET', KEYS[2])
  if type(last) == 'table' then return nil, last end
  local token = last and string.find(last, '^%d+$') and tonumber(last)
  if token and token >= (least or 0) and token < 2^53 then return token end
  return next_token()
end
