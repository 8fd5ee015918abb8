-- quorum/inspect: generated from its source in lua/src, do not edit.
-- quorum/inspect: what a node of a guarded quorum remembers. Writes nothing.
--
-- KEYS[1]  node   hash: as in admit
--
-- Returns  {run, highest, ttl, time}   the run id that was admitted, or an empty string; the
--                                      largest token that the node has accepted or that it was
--                                      admitted with; the longest lease that it has granted, in
--                                      milliseconds; the server's clock in microseconds
local node = redis.call('HMGET', KEYS[1], 'run', 'min_token', 'high', 'ttl')
local now = redis.call('TIME')
local highest = math.max(tonumber(node[2] or 0), tonumber(node[3] or 0))
return {node[1] or '', highest, tonumber(node[4] or 0), now[1] * 1000000 + now[2]}
