-- The client chooses the token, and more than half of the nodes must accept it. (On one server, the
-- server chooses: tokens.lua.)

--@include to_token

-- The largest token that this node had accepted, or was given when it was admitted, before this
-- request.
local highest

-- Why this node does not accept the proposal; nil: it does.
local function refuse_proposal(again)
  local accepted, minimum = to_token(redis.call('GET', KEYS[2]) or '0'), to_token(node and node[2] or '0')
  if not accepted or not minimum then return redis.error_reply('ERR the largest accepted token is spoilt') end
  highest = math.max(accepted, minimum)
  if proposed < highest or proposed == highest and not again then return {-8, highest} end
end

local function accept(token)
  if node and token > tonumber(node[3] or 0) then
    redis.call('HSET', KEYS[4], 'high', string.format('%.0f', token))
  end
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end
