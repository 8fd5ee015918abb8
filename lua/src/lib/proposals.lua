-- The client chooses the token, and more than half of the nodes must accept it. (On one server,
-- these functions are in tokens.lua: the server chooses.)

-- The largest token that this node had accepted, or was given when it was admitted, before this
-- request.
local highest
local function is_too_low(again)
  highest = highest or math.max(tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(node and node[2] or 0))
  return proposed < highest or proposed == highest and not again
end

local function accept(token)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  if node and token > tonumber(node[3] or 0) then
    redis.call('HSET', KEYS[4], 'high', string.format('%.0f', token))
  end
  return token
end

-- The token of a new lease, or nil and a refusal. A lease that is repaired after larger tokens were
-- accepted has none on this node.
local function take_token()
  if proposed and purpose ~= 'repair' and is_too_low(false) then return nil, {-8, highest} end
  note_lease()
  if not proposed or purpose == 'repair' and is_too_low(true) then return 0 end
  return accept(proposed)
end

-- The token of a hold beside or inside another one of its owner: that of the other one, unless the
-- nodes know different ones ("nested"). An attempt may propose its own token again.
local function hold_token(current, is_only, is_new)
  local accepts = proposed and (is_only or purpose == 'nested')
  if accepts and is_too_low(not is_new) then return nil, {-8, highest} end
  note_lease()
  if accepts then return accept(proposed) end
  return proposed and tonumber(current) or 0
end
