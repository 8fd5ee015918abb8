-- rwlock/renew_many: generated from its source in lua/src, do not edit.
-- rwlock/renew_many: extends the leases of those of many read-write locks that have one hold.
--
-- KEYS[1]  lock      hash: the holds, with a TTL. Then the key of the next lock, for at most 128
--                    locks
-- ARGV[1]  ttl_ms    as in renew, for all locks
-- ARGV[2]  attempt   as in read_acquire
-- ARGV[3]  owner     as in read_acquire; empty: the attempt. Then the attempt and the owner of the
--                    next lock
--
-- Returns  {answer...}   for each lock the server's clock in microseconds: held for at least ttl_ms
--                        from now; or -10: nothing was changed, send renew for this lock
--          -5            refused: an argument is malformed
--
-- A second delivery extends the leases again, by as little as the deliveries are apart.
local ttl_ms = ARGV[1]
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
local count = #KEYS
local arguments = 1 + 2 * count
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
local sole = {}
for i = 1, count do
  local attempt, owner = ARGV[2 * i], ARGV[1 + 2 * i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
  if not owner or owner == '' then
    owner = attempt
  elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
    return -5
  end
  sole[i] = owner .. ' ' .. attempt
end
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local answers = {}
for i = 1, count do
  answers[i] = -10
  local mode = redis.pcall('HGET', KEYS[i], 'mode')
  local is_held = mode == 'sole read ' .. sole[i] or mode == 'sole write ' .. sole[i]
  local pttl = is_held and redis.call('PTTL', KEYS[i]) or -1
  if pttl >= 0 then
    if pttl < tonumber(ttl_ms) then redis.call('PEXPIRE', KEYS[i], ttl_ms) end
    answers[i] = time
  end
end
return answers
