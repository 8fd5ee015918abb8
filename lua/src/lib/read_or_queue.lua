-- One reader more, and nobody writes or waits.
local readers, crowd = tonumber(state[2]) or 0, tonumber(ARGV[7] or 10000)
if keys == 1 and readers > 0 and readers < crowd and not (state[1] or state[3] or state[4]) then
  local token = known_token()
  redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. attempt, 'readers', readers + 1)
  if pttl < ttl_ms then redis.call('PEXPIREAT', KEYS[1], ends) end
  return token
end

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
local heir, its_owner = string.match(waiter, '^(%S+) [1-9]%d?%d?%d?%d? (%S+) %S*$')
if waiter ~= '' and (heir ~= attempt or its_owner ~= owner) then return -5 end
local waiting = redis.call('ZCARD', KEYS[3])
--@include unexpired

--@include has

--@include count

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include expand_sole_hold

--@include is_foreign

if not (state[1] or state[2] or state[6]) and is_foreign() then return -2 end
if state[6] then
  unfold()
  state = look()
  readers = tonumber(state[2]) or 0
end
if waiting > 0 and not live(state[1]) and (readers == 0 or state[1]) then
  let_in()
  state = look()
end

local write_ends, write = live(state[1])
local writes = write and string.match(write, '^%S+')
local read_ends, attempts = live(state[4])
readers = tonumber(state[2]) or 0

-- Expired readers do not count: where there seem to be too many, those of a sample are removed.
local function is_crowded(queued)
  if readers + queued < crowd then return false end
  local sample, over = redis.call('HRANDFIELD', KEYS[1], 128, 'WITHVALUES'), {}
  for i = 1, #sample, 2 do
    if string.sub(sample[i], 1, 5) == 'read:' and not live(sample[i + 1]) then over[#over + 1] = sample[i] end
  end
  if over[1] then readers = redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(over))) end
  state = look()
  return readers + queued >= crowd
end

local function queue()
  if waiter == '' then return end
  if redis.call('ZSCORE', KEYS[3], waiter) == false and is_crowded(redis.call('ZCARD', KEYS[3])) then return -7 end
  redis.pcall('ZADD', KEYS[3], 'NX', string.format('%.0f', queued_at - 4503599627370496), waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
end

if read_ends then
  if not has(attempts, attempt) then
    if count(attempts) >= tonumber(ARGV[5]) then return -4 end
    attempts = attempts .. ' ' .. attempt
  end
  ends = math.max(ends, read_ends)
elseif writes and writes ~= owner then
  return queue() or {write_ends - now, time}
else
  local gate = tonumber(state[3]) or 0
  if not writes and gate > now then
    -- A writer waits. Who queued before the last one left goes first all the same.
    local queued = waiter ~= '' and redis.call('ZSCORE', KEYS[3], waiter)
    local phase = redis.call('HGET', KEYS[1], 'phase')
    if not (queued and phase and queued + 4503599627370496 <= tonumber(phase)) then
      return queue() or {gate - now, time}
    end
  end
  if is_crowded(0) then return -7 end
  attempts = attempt
end

local token = known_token(writes)
if state[1] and not write then redis.call('HDEL', KEYS[1], 'write') end
if state[3] and tonumber(state[3]) <= now then redis.call('HDEL', KEYS[1], 'gate') end
if not state[4] then readers = readers + 1 end
redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. attempts, 'readers', readers)
keep_until(ends)
if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end
let_in()
return token
