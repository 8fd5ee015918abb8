-- quorum/admit: generated from lua/src/quorum/admit.lua, do not edit.
-- quorum/admit: admits a node to a guarded quorum, in two steps with the longest lease between
-- them.
--
-- KEYS[1]  node     hash: run: the run id of the server that was admitted; floor: its tokens must
--                   be larger than this; high: the largest token that it has accepted; ttl: the
--                   longest lease that it has granted; ticket: of the admission that was begun
-- ARGV[1]  run      the run id of this server, from INFO
-- ARGV[2]  ticket   new for every admission
-- ARGV[3]  floor    the largest token that a majority of the other nodes knows; empty: the first
--                   step
-- ARGV[4]  ttl_ms   the longest lease of a majority of the other nodes; default: none, in the first
--                   step
--
-- Returns  1             admitted
--          {2, ticket}   begun, with this ticket or an earlier one: wait for longer than the
--                        longest lease, then take the second step with that ticket
--          0             refused: the node has lost its data since the first step
--
-- The key has no TTL: it must last as long as any other key. A second delivery changes nothing.
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
