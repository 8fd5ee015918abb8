-- A node that restarted or lost its data has no vote until it is admitted again.
local node
if KEYS[4] then
  node = redis.call('HMGET', KEYS[4], 'run', 'min_token', 'high', 'ttl')
  if node[1] ~= run then return -9 end
end

-- Before each grant: the longest lease, which the admission of a node waits for.
local function note_lease()
  if node and tonumber(ttl_ms) > tonumber(node[4] or 0) then redis.call('HSET', KEYS[4], 'ttl', ttl_ms) end
end
