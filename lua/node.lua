-- redlatch, wire version 1: a node of a guarded quorum. Licence: MIT OR Apache-2.0.
--
-- A node that restarted or lost its data has no vote until it is admitted again, in two steps with
-- the longest lease between them. It has one key, without a TTL: it must last as long as any other.
--
--   node   lock:{}node   hash: run        the run id of the server that was admitted
--                              min_token  its tokens must be larger than this
--                              high       the largest token that it has accepted
--                              ttl        the longest lease that it has granted
--                              ticket     of the admission that was begun; empty: none was
--
--   EVALSHA sha1 1  node   verb words
--
--   verb     words
--   admit    run ticket [min_token ttl_ms]
--   survey
--
--   run        up to 128 bytes: the run id of this server, from INFO
--   ticket     up to 128 bytes: new for every admission
--   min_token  0 to a day ahead of the clock in microseconds: the largest token that a majority of
--              the other nodes knows; default: the first step
--   ttl_ms     1 to 9999999999: the longest lease of a majority of the other nodes; required in the
--              second step
--
--   admit    1             admitted; a second delivery changes nothing
--            {2, ticket}   begun, with this ticket or an earlier one: wait for longer than the
--                          longest lease, then take the second step with that ticket
--            0             refused: the node has lost its data since the first step
--            -5            refused: a word is malformed
--   survey   {run, highest, ttl, time}   the run id that was admitted, or an empty text; the
--                          largest token that the node has accepted or was admitted with; the
--                          longest lease, in milliseconds; the server's clock in microseconds.
--                          Writes nothing

local node, clock = KEYS[1], redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', node, 'run', 'min_token', 'high', 'ttl', 'ticket')
local least, high, longest = known[2] or '0', known[3] or '0', known[4] or '0'
if not string.find(least .. ' ' .. high .. ' ' .. longest, '^%d+ %d+ %d+$')
  or math.max(least, high, longest) >= 2^53 then
  return {err = 'ERR the admission of the node is spoilt'}
end
if ARGV[1] == 'survey' then
  return {known[1] or '', math.max(tonumber(least), tonumber(high)), tonumber(longest), time}
end

local verb, run, ticket, min_token, ttl_ms = unpack(ARGV)
if min_token == '' then min_token = nil end
if ttl_ms == '' then ttl_ms = nil end
local latest = time + 86400000000 -- a day ahead
if verb ~= 'admit' or not run or run == '' or #run > 128
  or not ticket or ticket == '' or #ticket > 128
  or min_token and not (string.find(min_token, '^%d+$') and tonumber(min_token) <= latest)
  or ttl_ms and (#ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$'))
  or min_token and not ttl_ms then
  return -5
end

if known[1] == run then return 1 end
local begun = known[5] ~= '' and known[5] -- an admission leaves an empty ticket
if not min_token then
  if not begun then redis.call('HSET', node, 'ticket', ticket) end
  return {2, begun or ticket}
end
if begun ~= ticket then return 0 end
least = string.format('%.0f', math.max(tonumber(least), tonumber(min_token)))
longest = math.max(tonumber(longest), tonumber(ttl_ms))
redis.call('HSET', node, 'run', run, 'min_token', least, 'ttl', longest, 'ticket', '') -- at once
return 1
