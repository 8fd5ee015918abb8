-- Of a guarded quorum: a node that restarted or lost its data has no vote until it is admitted again.
local node
if KEYS[5] then
  node = redis.call('HMGET', KEYS[5], 'run', 'floor', 'high', 'ttl')
  if node[1] ~= ARGV[8] then return -9 end
  if ttl_ms > tonumber(node[4] or 0) then redis.call('HSET', KEYS[5], 'ttl', ttl_ms) end
end
