-- The largest token that this node has accepted, or that it was told of when it was admitted.
local function largest()
  return math.max(tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(node and node[2] or 0))
end
