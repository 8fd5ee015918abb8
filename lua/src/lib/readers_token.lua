-- What readers get: that of the last writer, unless it is below the floor, since others may have had larger ones then.
local function readers_token(known)
  local token = tonumber(known or redis.call('GET', KEYS[2]) or '')
  return token and token >= (tonumber(floor) or 0) and token or next_token()
end
