-- quorum/admit.lua: admit a node to a guarded quorum, in two steps with a ttl of the longest lease between them.
--
-- KEYS[1]  node    hash: run -> run id of the server that was admitted; floor -> what its tokens must be larger than;
--                  high -> the largest token it has accepted; ttl -> the longest lease it has granted; ticket -> who
--                  admits it
-- ARGV[1]  run     the run id of this server, from INFO
-- ARGV[2]  ticket  fresh for every admission
-- ARGV[3]  floor   the largest token of a majority of the other nodes; empty: the first step
-- ARGV[4]  ttl_ms  the longest lease of a majority of the other nodes
--
-- Returns  1   admitted
--          {2, ticket}  begun, by this ticket or an earlier one: wait for longer than the longest lease, then take the
--                       second step with that one
--          0   refused: the node has lost its data since the first step
--
-- The key has no ttl: what it says must be gone only when all else is gone as well. Delivered twice, it admits once.
local run, ticket, floor = ARGV[1], ARGV[2], ARGV[3]

local node = redis.call('HMGET', KEYS[1], 'run', 'ticket', 'floor', 'ttl')
if node[1] == run then return 1 end
if floor == '' then
  if not node[2] then redis.call('HSET', KEYS[1], 'ticket', ticket) end
  return {2, node[2] or ticket}
end
if node[2] ~= ticket then return 0 end
floor = math.max(tonumber(node[3] or 0), tonumber(floor))
local ttl_ms = math.max(tonumber(node[4] or 0), tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], 'run', run, 'floor', string.format('%.0f', floor), 'ttl', ttl_ms)
redis.call('HDEL', KEYS[1], 'ticket')
return 1
