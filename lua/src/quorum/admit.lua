-- quorum/admit: admits a node to a guarded quorum, in two steps with the longest lease between
-- them.
--
-- KEYS[1]  node       hash: run: the run id of the server that was admitted; min_token: its tokens
--                     must be larger than this; high: the largest token that it has accepted; ttl:
--                     the longest lease that it has granted; ticket: of the admission that was
--                     begun
-- ARGV[1]  run        up to 128 bytes: the run id of this server, from INFO
-- ARGV[2]  ticket     up to 128 bytes: new for every admission
-- ARGV[3]  min_token  0 to a day ahead of the clock in microseconds: the largest token that a
--                     majority of the other nodes knows; default: the first step
-- ARGV[4]  ttl_ms     1 to 9999999999: the longest lease of a majority of the other nodes; required
--                     in the second step
--
-- Returns  1             admitted
--          {2, ticket}   begun, with this ticket or an earlier one: wait for longer than the
--                        longest lease, then take the second step with that ticket
--          0             refused: the node has lost its data since the first step
--          -5            refused: an argument is malformed
--
-- The key has no TTL: it must last as long as any other key. A second delivery changes nothing.
local run, ticket, min_token, ttl_ms = unpack(ARGV)
-- Every argument is checked on every path, before the first write.
if not run or run == '' or #run > 128 or not ticket or ticket == '' or #ticket > 128 then return -5 end
local clock = redis.call('TIME')
local minimum = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (string.find(min_token, '^%d+$') and minimum <= (clock[1] + 86400) * 1000000) then return -5 end
if ttl_ms == '' then ttl_ms = nil end
if (ttl_ms or min_token) and (not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$')) then return -5 end

local node = redis.call('HMGET', KEYS[1], 'run', 'ticket', 'min_token', 'ttl')
if node[1] == run then return 1 end
if not min_token then
  if not node[2] then redis.call('HSET', KEYS[1], 'ticket', ticket) end
  return {2, node[2] or ticket}
end
if node[2] ~= ticket then return 0 end
minimum = math.max(tonumber(node[3] or 0), minimum)
local longest = math.max(tonumber(node[4] or 0), tonumber(ttl_ms))
redis.call('HSET', KEYS[1], 'run', run, 'min_token', string.format('%.0f', minimum), 'ttl', longest)
redis.call('HDEL', KEYS[1], 'ticket')
return 1
