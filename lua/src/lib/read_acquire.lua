local refusal = read_state()
if refusal then return refusal end
local ends = now + tonumber(ttl_ms)

-- A second delivery and later readers get this token again.
local function note_token(token)
  if token > 0 and token ~= to_token(state.token) then
    redis.call('HSET', KEYS[1], 'token', string.format('%.0f', token))
  end
end

-- One reader more, and no attempt writes or waits.
if keys == 1 and state.readers > 0 and state.readers < reader_limit
  and not (state.write or state.read) and state.wait_until == 0 then
  local token, problem = nested_read_token()
  if not token then return problem end
  redis.call('HSET', KEYS[1], 'read:' .. owner, ends .. ' ' .. attempt, 'readers', state.readers + 1)
  note_token(token)
  if state.pttl < tonumber(ttl_ms) then redis.call('PEXPIREAT', KEYS[1], ends) end
  return token
end

--@include holds

--@include keep_until

--@include waiter

--@include waiter_text
local waiter = waiter_for('read', owner ~= attempt and owner or '', ' ' .. depth)
--@include queue

--@include leave_queue

--@include notify

--@include first_writer

--@include admit_waiters

--@include expand_sole_hold

--@include other_reader

--@include refuse_ended
expand_sole_hold()
if not unexpired(state.write) and (state.readers == 0 or state.write) then
  scores = nil -- it removes what it admits, and dead waiters
  admit_waiters()
  read_state()
end

-- Dead readers do not count: they are removed where there seem to be too many.
local function is_full(queued)
  if state.readers + queued < reader_limit then return false end
  other_reader()
  read_state()
  return state.readers + queued >= reader_limit
end

local function queue_to_read()
  if not claim then return nil end
  local function is_full_with_queue()
    return is_full(redis.call('ZCOUNT', KEYS[3], '-inf', '(4503599627370496'))
  end
  -- Dead waiters do not count either.
  if not redis.call('ZSCORE', KEYS[3], waiter) and is_full_with_queue() then
    remove_dead(128)
    if is_full_with_queue() then return -7 end
  end
  queue(place or time, -2^52, scores)
end

local write_ends, write = unexpired(state.write)
local writer = write and string.match(write, '^[^ ]+')
local read_ends, attempts = unexpired(state.read)
if read_ends then
  if not has(attempts, attempt) then
    if count(attempts) >= depth then return -4 end
    attempts = attempts .. ' ' .. attempt
  end
  ends = math.max(ends, read_ends)
elseif writer and writer ~= owner then
  return queue_to_read() or {write_ends - now, time}
else
  if not writer and state.wait_until > now then
    -- A writer waits. Readers that queued before it, or before the last writer left, go first all
    -- the same, even if they have lost their places since.
    local entry, _, _, _, _, writer_place = first_writer()
    local score = claim and redis.call('ZSCORE', KEYS[3], waiter)
    local since = score and tonumber(score) + 2^52 or claim and place
    local goes_first = since and (entry and since < writer_place or state.writer_left and since <= state.writer_left)
    if (entry or is_unfinished) and not goes_first then
      return queue_to_read() or {state.wait_until - now, time}
    end
    if not entry and not is_unfinished then redis.call('HDEL', KEYS[1], 'writer_wait_until', 'upgrade') end
  end
  if no_token then return no_token end
  if is_unfinished then return queue_to_read() or {10, time} end
  if is_full(0) then return -7 end
  attempts = attempt
end

local token, problem = nested_read_token(writer)
if not token then return problem end
if state.write and not write then redis.call('HDEL', KEYS[1], 'write') end
if state.wait_until > 0 and state.wait_until <= now then redis.call('HDEL', KEYS[1], 'writer_wait_until') end
redis.call('HSET', KEYS[1], 'mode', 'several', 'read:' .. owner, ends .. ' ' .. attempts,
  'readers', state.readers + (state.read and 0 or 1))
-- Inside a hold to write without a token, this one may be the former writer's. A nested hold to
-- write must get a larger one.
if not write or to_token(state.token) then note_token(token) end
keep_until(ends)
leave_queue(waiter)
admit_waiters()
return token
