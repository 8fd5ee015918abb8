--@include to_token

-- The largest token that this node has accepted; nil if the counter is spoilt.
local function accepted()
  local token = redis.pcall('GET', KEYS[2])
  if not token then return 0 end
  return type(token) == 'string' and to_token(token) or nil
end

-- The text is written as it came, if there is one: formatting a number takes as long as a command.
local function accept(token, text)
  redis.call('SET', KEYS[2], text or string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end
