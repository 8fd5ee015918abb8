-- rwlock/release: releases one hold, or ends an attempt.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        as in acquire
-- ARGV[2]  owner          as in acquire; default: the attempt
-- ARGV[3]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[4]  remember       1: refuse the attempt and repeat this answer for a minute; default: no
-- ARGV[5]  claim_ms       as in acquire, to leave the queue; default: it is not queued
-- ARGV[6]  channel        as in acquire; default: it polls
-- ARGV[7]  max_depth      as in acquire; default: 255
-- ARGV[8]  token_ttl_ms   as in acquire; default: 3600000
--
-- Returns  1     released, the last hold of its owner
--          1+n   released; the owner has n holds left
--          0     the attempt held nothing
--          -2    refused: the key holds something else
--          -5    refused: an argument is malformed
--
-- Waiters that may enter are admitted: all readers that waited, or one writer. A second delivery
-- changes nothing; with remember, it gets the first answer.
local attempt, owner, min_token, remember, claim_ms, channel, max_depth, token_ttl_ms = unpack(ARGV)
--@include check_release
--@include check_optional_owner
--@include check_depth

-- The common cases: a hold that is alone, so that none waits, or one of several readers; and
-- nothing to remember.
if not remember and not claim then
  local mode, sole = redis.pcall('HGET', KEYS[1], 'mode'), owner .. ' ' .. attempt
  if mode == 'sole read ' .. sole or mode == 'sole write ' .. sole then
    redis.call('DEL', KEYS[1])
    return 1
  end
  if mode == 'several' then
    local found = redis.call('HMGET', KEYS[1], 'read:' .. owner, 'readers', 'write')
    local readers = tonumber(found[2]) or 0
    local ends, reader = string.match(found[1] or '', '^(%d+) ([^ ]+)$')
    if reader == attempt and readers > 1 and not found[3] and redis.call('EXISTS', KEYS[3]) == 0 then
      local instant = redis.call('TIME')
      if tonumber(ends) > instant[1] * 1000 + math.floor(instant[2] / 1000) then
        redis.call('HDEL', KEYS[1], 'read:' .. owner)
        redis.call('HSET', KEYS[1], 'readers', readers - 1)
        return 1
      end
    end
  end
end

--@include clock_ms

--@include limit_min_token

--@include next_token

--@include to_token

--@include new_read_token

--@include read_state

--@include holds

--@include without

--@include keep_until

--@include waiter

--@include waiter_text

--@include leave_queue

--@include notify

--@include first_writer

--@include admit_waiters

--@include expand_sole_hold

--@include other_reader

--@include delete_if_free

--@include remember

-- Whether another attempt of the owner, which reads, waits to write (place 0). It keeps the mark:
-- without it another reader would also queue to write, and each would wait for the other.
local function upgrades()
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], 0, 0, 'LIMIT', 0, 64)) do
    local other, other_kind, _, _, other_owner = parse(entry)
    if other_kind == 'write' and (other_owner == owner or other_owner == '' and other == owner) then return true end
  end
  return false
end

local refusal = read_state()
local waiter_owner, waiter_depth = owner ~= attempt and owner or '', ' ' .. depth
leave_queue(waiter_for('read', waiter_owner, waiter_depth))
if leave_queue(waiter_for('write', waiter_owner, waiter_depth)) and not refusal then
  local _, upgrader = string.match(state.upgrade or '', '^(%d+) (.+)$')
  if upgrader == owner and not upgrades() then redis.call('HDEL', KEYS[1], 'upgrade') end
  if no_writer_waits() then redis.call('HDEL', KEYS[1], 'writer_wait_until') end
end
if refusal then return answer(-2) end
expand_sole_hold()
local write_ends, write = unexpired(state.write)
local writer, writes = string.match(write or '', '^([^ ]+) (.+)$')
local read_ends, reads = unexpired(state.read)
-- Holds that have expired keep no waiter out.
if state.read and not reads then other_reader() end
if state.write and not write then end_write() end
if writer ~= owner then writes = nil end
local is_writing, is_reading = writes and has(writes, attempt), reads and has(reads, attempt)
--@include leave_write
if is_reading then
  reads = without(reads, attempt)
  redis.call('HDEL', KEYS[1], reads and 'read:' or 'read:' .. owner)
  if reads then
    redis.call('HSET', KEYS[1], 'read:' .. owner, read_ends .. ' ' .. reads)
  else
    redis.call('HINCRBY', KEYS[1], 'readers', -1)
  end
end
local number = 0
if is_writing or is_reading then number = 1 + count(writes or '') + count(reads or '') end
answer(number)
admit_waiters()
delete_if_free()
return number
