-- rwlock/read_wait_many: keeps the places of many attempts of one client that wait to read a lock.
--
-- KEYS[1]  lock        hash: the holds, with a TTL
-- KEYS[2]  waiters     zset: waiters by their places, and marks
-- ARGV[1]  claim_ms    as in read_acquire, for all attempts
-- ARGV[2]  channel     as in read_acquire, for all attempts
-- ARGV[3]  max_depth   as in read_acquire, for all attempts
-- ARGV[4]  attempt     as in read_acquire
-- ARGV[5]  owner       as in read_acquire; empty: the attempt. Then the attempt and the owner of
--                      the next waiter, for at most 1024 waiters
--
-- Returns  {pttl, time, waiter...}   busy: as in read_acquire. The waiters, counted from 1, that
--                                    have no place or may enter: send read_acquire for these
--          -10                       nothing was changed, send read_acquire for all of them
--          -5                        refused: an argument is malformed
--
-- It queues and grants nothing, so a late or a second delivery only makes waiters count as alive
-- that still have a place.
local claim_ms, channel, max_depth = unpack(ARGV, 1, 3)
--@include check_waiter
if not claim then return -5 end
--@include check_depth
local waiting = (#ARGV - 3) / 2
if waiting < 1 or waiting > 1024 or waiting % 1 > 0 or #KEYS ~= 2 then return -5 end
local owners, waiters, fields = {}, {}, {'mode', 'write', 'writer_wait_until'}
for i = 1, waiting do
  local attempt, owner = ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  --@include check_attempt
  --@include check_optional_owner
  owners[i], fields[3 + i] = owner, 'read:' .. owner
  waiters[i] = attempt .. ' read ' .. claim_ms .. ' ' .. (channel or '') .. ' '
    .. (owner ~= attempt and owner or '') .. ' ' .. depth
end

--@include clock_ms

--@include holds

local found = redis.pcall('HMGET', KEYS[1], unpack(fields))
local places = redis.pcall('ZMSCORE', KEYS[2], unpack(waiters))
local pttl = redis.call('PTTL', KEYS[1])
if found.err or places.err or pttl < 0 then return -10 end
-- For how long readers stay out: another owner writes, or waits to write.
local writer, busy_ms = string.match(found[1] or '', '^sole write ([^ ]+)'), pttl
if not writer then
  local write_ends, write = unexpired(found[2])
  writer = write and string.match(write, '^[^ ]+')
  busy_ms = (write_ends or tonumber(found[3]) or 0) - now
end
if busy_ms < 1 then return -10 end

local answer, marks = {busy_ms, time}, {}
for i = 1, waiting do
  if places[i] and owners[i] ~= writer and not unexpired(found[3 + i]) then
    marks[#marks + 1] = 2^52 + 61000000 + time + claim * 1000
    marks[#marks + 1] = 'seen ' .. ARGV[2 + 2 * i]
  else
    answer[#answer + 1] = i
  end
end
if marks[1] then
  redis.call('ZADD', KEYS[2], unpack(marks))
  redis.call('PEXPIRE', KEYS[2], '60000')
end
return answer
