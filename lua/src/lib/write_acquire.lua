--@include holds

--@include keep_until

--@include waiter

--@include waiter_text
local waiter = waiter_for('write', owner ~= attempt and owner or '', ' ' .. depth)
--@include queue

--@include leave_queue

--@include notify

--@include first_writer

--@include admit_waiters

--@include expand_sole_hold

--@include other_reader

--@include refuse_ended
local refusal = read_state()
if refusal then return refusal end
expand_sole_hold()
local ends = now + tonumber(ttl_ms)
-- A late delivery of what was downgraded since: it reads, and must not begin to write again.
local _, reads_by = unexpired(state.read)
if reads_by and has(reads_by, attempt) then return -1 end

local function others_read()
  return state.readers > (unexpired(state.read) and 1 or 0)
end
local other_ends
if not unexpired(state.write) then
  other_ends = others_read() and other_reader()
  read_state()
  if not other_ends and not unexpired(state.read) then
    scores = nil -- what follows removes what it admits, and dead waiters
    admit_waiters()
    read_state()
    other_ends = others_read() and now + math.max(state.pttl, 1)
  end
end

local reads = unexpired(state.read)
local write_ends, write = unexpired(state.write)
local writer, attempts = string.match(write or '', '^([^ ]+) (.+)$')
if writer == owner then
  local is_held = has(attempts, attempt)
  if not is_held and count(attempts) >= depth then return -4 end
  local token, problem = hold_token(to_token(state.token), attempts == attempt, not is_held)
  if not token then return problem end
  if not is_held then attempts = attempts .. ' ' .. attempt end
  ends = math.max(ends, write_ends)
  redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. owner .. ' ' .. attempts)
  if token > 0 then redis.call('HSET', KEYS[1], 'token', string.format('%.0f', token)) end
  keep_until(ends)
  leave_queue(waiter)
  if state.wait_until > 0 and no_writer_waits() then redis.call('HDEL', KEYS[1], 'writer_wait_until') end
  return token
end

if write or other_ends then
  if claim then
    local upgrades = not write and reads
    local upgrade_ends, upgrader = unexpired(state.upgrade)
    if upgrades and upgrader and upgrader ~= owner
      and unexpired(redis.call('HGET', KEYS[1], 'read:' .. upgrader)) then
      return -6
    end
    if upgrades then
      redis.call('ZADD', KEYS[3], 0, waiter) -- before all other writers: they wait for this reader
      if upgrader ~= owner then upgrade_ends = 0 end
      redis.call('HSET', KEYS[1], 'upgrade', math.max(now + claim, upgrade_ends) .. ' ' .. owner)
    end
    queue(upgrades and 0 or place or time, 0, scores)
    redis.call('HSET', KEYS[1], 'writer_wait_until', math.max(now + claim, state.wait_until))
  end
  return {(write_ends or other_ends) - now, time}
end

if no_token then return no_token end
if is_unfinished then
  queue(place or time, 0)
  return {10, time}
end
local token
token, refusal = take_token()
if not token then return refusal end
redis.call('HSET', KEYS[1], 'mode', 'several', 'write', ends .. ' ' .. owner .. ' ' .. attempt)
if token > 0 then
  redis.call('HSET', KEYS[1], 'token', string.format('%.0f', token))
else
  redis.call('HDEL', KEYS[1], 'token')
end
keep_until(ends)
leave_queue(waiter)
local _, upgrader = unexpired(state.upgrade)
if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
if no_writer_waits() then redis.call('HDEL', KEYS[1], 'writer_wait_until', 'upgrade') end
return token
