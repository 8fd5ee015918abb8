-- rwlock/inspect.lua: who holds the lock, how often, for how long, and who waits. Writes nothing.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- ARGV[1]  owner     to list only this owner's holds; absent: everybody's
--
-- Returns  { 1, fence, waiters, time, waiting_writers, readers}    then for each holder: side, owner, count, pttl
--          {-2, 0, 0, time}    the key holds something that is not a read-write lock
--          {-3, 0, 0, time}    the key holds something without a ttl
--
-- fence is the last token granted, as a string, or '0'. The writer comes first, side "write"; then readers, side
-- "read": five hundred at most, and fewer where many of a thousand are dead, since to look at all takes too long.
-- waiters counts both sides; readers counts all: if not all are listed, with the dead who were not swept yet.
--@include clock

--@include unexpired

--@include count

local write = redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'sole')
if write.err then return {-2, 0, 0, time} end
if redis.call('PTTL', KEYS[1]) == -1 then return {-3, 0, 0, time} end
local waiters = redis.pcall('ZCARD', KEYS[3])
if type(waiters) == 'table' then waiters = 0 end
local writers = waiters > 0 and redis.call('ZCOUNT', KEYS[3], 0, '+inf') or 0
local fence = redis.pcall('GET', KEYS[2])
if type(fence) ~= 'string' or not tonumber(fence) then fence = '0' end
local answer = {1, fence, waiters, time, writers, tonumber(write[2]) or 0}
local function add(side, its_owner, attempts, ends)
  for _, word in ipairs({side, its_owner, count(attempts), ends - now}) do answer[#answer + 1] = word end
end
local ends, words = live(write[1])
local owner = ARGV[1]
local side, alone, attempt = string.match(write[3] or '', '^(%S+) (%S+) (%S+)$')
if side then
  if side == 'unfenced' then side = 'write' end
  if side == 'read' then answer[6] = 1 end
  if not owner or owner == alone then add(side, alone, attempt, now + redis.call('PTTL', KEYS[1])) end
  return answer
end
if ends then
  local its_owner, attempts = string.match(words, '^(%S+) (.+)$')
  if not owner or owner == its_owner then add('write', its_owner, attempts, ends) end
end
if owner then
  local till, attempts = live(redis.call('HGET', KEYS[1], 'read:' .. owner))
  if till then add('read', owner, attempts, till) end
  return answer
end
local cursor, listed, pages = '0', 0, 0
repeat
  local page = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', 256)
  cursor, pages = page[1], pages + 1
  for i = 1, #page[2], 2 do
    local till, attempts = live(page[2][i + 1])
    if till and string.sub(page[2][i], 1, 5) == 'read:' and listed < 500 then
      add('read', string.sub(page[2][i], 6), attempts, till)
      listed = listed + 1
    end
  end
until cursor == '0' or listed == 500 or pages == 4
if cursor == '0' then answer[6] = listed end
return answer
