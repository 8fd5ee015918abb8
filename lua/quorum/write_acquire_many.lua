-- quorum/write_acquire_many: generated from its source in lua/src, do not edit.
-- quorum/write_acquire_many: acquires those of many read-write locks to write that are free and
-- have no waiter, on one node of a quorum.
--
-- KEYS[1]  lock           hash: the holds, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks. Then the keys of the next lock,
--                         for at most 128 locks
-- ARGV[1]  ttl_ms         as in write_acquire, for all locks
-- ARGV[2]  token_ttl_ms   as in write_acquire, for all locks; empty: 3600000
-- ARGV[3]  attempt        as in write_acquire
-- ARGV[4]  owner          as in write_acquire; empty: the attempt
-- ARGV[5]  proposal       as in write_acquire; empty: no token. Then the attempt, the owner
--                         and the proposal of the next lock
--
-- Returns  {answer...}    for each lock the token as in write_acquire, or -10: nothing was
--                         changed, send write_acquire for this lock
--          -5             refused: an argument is malformed
--
-- A second delivery answers -10 for the locks that the first one acquired. A guarded quorum sends
-- write_acquire for each lock.
local ttl_ms, token_ttl_ms = ARGV[1], ARGV[2]
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
local count = #KEYS / 3
local arguments = 2 + 3 * count
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
local instant = redis.call('TIME')
local latest = (instant[1] + 86400) * 1000000
local owners = {}
for i = 1, count do
  local attempt, owner, proposal = ARGV[3 * i], ARGV[1 + 3 * i], ARGV[2 + 3 * i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
  if not owner or owner == '' then
    owner = attempt
  elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
    return -5
  end
  if proposal ~= '' and (not string.find(proposal, '^[1-9]%d*$') or tonumber(proposal) > latest) then
    return -5
  end
  owners[i] = owner
end

-- The fragments act on the keys of one lock at a time.
local keys, KEYS = KEYS, {}

-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end

-- The largest token that this node has accepted; nil if the counter is spoilt.
local function accepted()
  local token = redis.pcall('GET', KEYS[2])
  if not token then return 0 end
  return type(token) == 'string' and to_token(token) or nil
end

-- The text is written as it came, if there is one: formatting a number takes as long as a command.
local function accept(token, text)
  redis.call('SET', KEYS[2], text or string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

-- The proposal, if it is larger than all that this node has accepted.
local function take_token(proposal)
  if proposal == '' then return 0 end
  local proposed, highest = tonumber(proposal), accepted()
  return highest and proposed > highest and accept(proposed, proposal) or nil
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
  local attempt, owner, token = ARGV[3 * i], owners[i], nil
  if are_free or redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then token = take_token(ARGV[2 + 3 * i]) end
  if token then
    local sole = 'sole write ' .. owner .. ' ' .. attempt
    if token > 0 then
      redis.call('HSET', KEYS[1], 'mode', sole, 'token', string.format('%.0f', token))
    else
      redis.call('HSET', KEYS[1], 'mode', sole)
    end
    redis.call('PEXPIRE', KEYS[1], ttl_ms)
  end
  answers[i] = token or -10
end
return answers
