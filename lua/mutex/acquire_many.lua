-- mutex/acquire_many: generated from its source in lua/src, do not edit.
-- mutex/acquire_many: acquires those of many mutexes that are free and have no waiter.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in acquire, for all locks
-- ARGV[2]  min_token      as in acquire, for all locks; empty: no token
-- ARGV[3]  token_ttl_ms   as in acquire, for all locks; empty: 3600000
-- ARGV[4]  attempt        as in acquire. Then that of the next lock
--
-- Returns  {answer...}    for each lock the token as in acquire, or -10: nothing was changed, send
--                         acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired.
local ttl_ms, min_token, token_ttl_ms = ARGV[1], ARGV[2], ARGV[3]
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
local minimum = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (string.find(min_token, '^%d+$') and minimum < 2^52) then return -5 end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
local count = #KEYS / 3
local arguments = 3 + count
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
for i = 1, count do
  local attempt = ARGV[3 + i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
end

-- The fragments act on the keys of one lock at a time.
local keys, KEYS = KEYS, {}

-- A counter above min_token: INCR suffices until the counter is lost or the clock has passed it.
-- Nil and a refusal if the counter is spoilt, or min_token is more than a day ahead of the clock.
local function next_token()
  local token = redis.pcall('INCR', KEYS[2])
  if type(token) == 'table' then return nil, token end
  if token > 1 and token > (minimum or 0) and token < 2^53 then return token end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  if token >= 2^53 or (minimum or 0) > time + 86400000000 then
    if token == 1 then redis.call('DEL', KEYS[2]) else redis.call('DECR', KEYS[2]) end
    return nil, token >= 2^53 and redis.error_reply('ERR the fencing counter is at 2^53') or -5
  end
  token = math.max((minimum or 0) + 1, time)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

local function grant(waiter_attempt, _, _, ms)
  redis.call('SET', KEYS[1], waiter_attempt, 'PX', ms)
end

-- Whether the lock is free and nothing waits for it. A mark of an ended attempt is no waiter: with
-- one of them, all requests for the lock would be sent alone for a minute.
local function is_free(attempt)
  local keys = redis.call('EXISTS', KEYS[1], KEYS[3])
  if keys == 0 then return true end
  if keys == 2 or redis.call('EXISTS', KEYS[1]) == 1 then return false end
  local first = redis.pcall('ZRANGE', KEYS[3], '0', '0', 'WITHSCORES')
  return (tonumber(first[2]) or 0) >= 2^52 and not redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt)
end

-- Whether no lock is held or has a queue: one call for all of them takes less time than one for
-- each. A lock may occur twice: the second time, its first attempt has it.
local are_free, companions, seen = true, {}, {}
for i = 1, #keys, 3 do
  are_free = are_free and not seen[keys[i]]
  seen[keys[i]] = true
  companions[#companions + 1], companions[#companions + 2] = keys[i], keys[i + 2]
end
are_free = are_free and redis.call('EXISTS', unpack(companions)) == 0

local answers = {}
for i = 1, count do
  KEYS[1], KEYS[2], KEYS[3] = keys[3 * i - 2], keys[3 * i - 1], keys[3 * i]
  local token
  if are_free or is_free(ARGV[3 + i]) then token = not min_token and 0 or next_token() end
  if token then grant(ARGV[3 + i], nil, nil, ttl_ms) end
  answers[i] = token or -10
end
return answers
