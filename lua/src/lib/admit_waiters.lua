-- How many batches of dead waiters one script passes over is bounded.
local batches = 0

-- Why there is no token for a waiter that may enter. A release still frees the lock, but no other
-- attempt may be granted it before the waiter.
local no_token

-- Grants the lock, for a claim: to all readers that queued before the last writer left; else to the
-- writer that has waited longest; else to all readers. While readers hold the lock, it is granted
-- to more readers if no writer waits, or to the only reader if it waits to write. One message is
-- published for each client, before the grants are written: after its first write, a script is
-- not refused for lack of memory.
local function admit_waiters()
  if redis.call('EXISTS', KEYS[3]) == 0 then return end
  if read_state() or unexpired(state.write) then return end
  local readers, gated, writer_left = state.readers, state.wait_until > now, state.writer_left
  if state.write then -- its writer is dead
    end_write()
    writer_left = time - 1
  end

  -- The rest, beyond one batch: the first one that is notified polls, and admits the next batch.
  local function notify_rest(latest)
    for _, each in ipairs(redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', latest, 'LIMIT', 0, 64)) do
      local waiter_attempt, _, _, waiter_channel = parse(each)
      local is_notified = waiter_attempt and waiter_channel ~= ''
        and notify(waiter_channel, waiter_attempt .. ' 0 0 ' .. KEYS[1])
      if is_notified then return end
    end
  end

  -- The readers of a batch that may enter, by channel: dead ones may not, nor those whose owner has
  -- `max_depth` holds.
  local function select_readers(waiting)
    local channels, holds = {}, {}
    for i = 1, #waiting, 2 do
      local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth = parse(waiting[i])
      if waiter_attempt and waiter_kind == 'read' and is_alive(waiter_attempt, tonumber(waiting[i + 1]), ms) then
        if waiter_owner == '' then waiter_owner = waiter_attempt end
        local hold = holds[waiter_owner]
        if not hold then
          local field = redis.call('HGET', KEYS[1], 'read:' .. waiter_owner)
          local ends, attempts = unexpired(field)
          hold = {ends = ends or 0, attempts = attempts or '', count = count(attempts or ''), is_new = not field}
          holds[waiter_owner] = hold
        end
        if hold.count < (tonumber(waiter_depth) or 255) then
          hold.count = hold.count + 1
          if waiter_attempt == attempt then waiter_channel = '' end
          channels[waiter_channel] = channels[waiter_channel] or {}
          table.insert(channels[waiter_channel], {waiter_attempt, waiter_owner, now + ms})
        end
      end
    end
    return channels, holds
  end

  -- False once the queue is empty, or too many were dead.
  local function admit_readers(latest)
    batches = batches + 1
    local batch_size = readers > 512 and 16 or 128
    local waiting = redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', latest, 'WITHSCORES', 'LIMIT', 0, batch_size)
    if not waiting[1] then return false end
    if batches > 2 then
      is_unfinished = true
      return false
    end
    local channels, holds = select_readers(waiting)
    local token
    if next(channels) then
      token, no_token = new_read_token(state.token)
      if not token then return false end
    end
    local removed = {}
    for i = 1, #waiting, 2 do
      removed[i], removed[i + 1] = waiting[i], 'seen ' .. string.match(waiting[i], '^[^ ]*')
    end
    redis.call('ZREM', KEYS[3], unpack(removed))
    local last, admitted = now, {}
    for waiter_channel, some in pairs(channels) do
      local names = {}
      for i, each in ipairs(some) do names[i] = each[1] end
      if notify(waiter_channel, message(table.concat(names, ','), token)) then
        for _, each in ipairs(some) do
          local hold = holds[each[2]]
          hold.ends = math.max(hold.ends, each[3])
          hold.attempts = (hold.attempts == '' and '' or hold.attempts .. ' ') .. each[1]
          admitted[each[2]] = hold
          last = math.max(last, hold.ends)
        end
      end
    end
    if not next(admitted) then return admit_readers(latest) end
    for waiter_owner, hold in pairs(admitted) do
      if hold.is_new then readers = readers + 1 end
      redis.call('HSET', KEYS[1], 'read:' .. waiter_owner, hold.ends .. ' ' .. hold.attempts)
    end
    redis.call('HSET', KEYS[1], 'mode', 'several', 'readers', readers, 'token', string.format('%.0f', token))
    keep_until(last)
    if #waiting == 2 * batch_size then notify_rest(latest) end
    return true
  end

  local function admit_writer(reader)
    local token
    for _ = 1, reader and 1 or 32 do
      local entry, next_attempt, ms, waiter_channel, waiter_owner = first_writer()
      if not entry then
        if not is_unfinished then redis.call('HDEL', KEYS[1], 'writer_wait_until', 'upgrade') end
        return false
      end
      if reader and waiter_owner ~= reader then return false end
      if not token then token, no_token = next_token() end
      if not token then return false end
      redis.call('ZREM', KEYS[3], entry, 'seen ' .. next_attempt)
      redis.call('HDEL', KEYS[1], 'upgrade')
      if next_attempt == attempt then waiter_channel = '' end
      if notify(waiter_channel, message(next_attempt, token)) then
        redis.call('HSET', KEYS[1], 'mode', 'several', 'write', now + ms .. ' ' .. waiter_owner .. ' ' .. next_attempt,
          'token', string.format('%.0f', token))
        if no_writer_waits() then redis.call('HDEL', KEYS[1], 'writer_wait_until') end
        keep_until(now + ms)
        return true
      end
    end
    is_unfinished = is_unfinished or not reader
    return false
  end

  local waited = writer_left and string.format('%.0f', writer_left - 2^52)
  if readers > 0 then
    if not gated then
      if admit_readers('(0') then return end
    elseif not (waited and admit_readers(waited)) and not is_unfinished then
      local _, waiter_owner = unexpired(state.upgrade)
      local is_alone = readers == 1 and waiter_owner and redis.call('HEXISTS', KEYS[1], 'read:' .. waiter_owner) == 1
      if is_alone and admit_writer(waiter_owner) then return end
      if no_writer_waits() then
        redis.call('HDEL', KEYS[1], 'writer_wait_until', 'upgrade')
        admit_readers('(0')
      end
    end
    return
  end
  -- All but the queue has expired: then age decides, and the writer that waits keeps new readers
  -- out again.
  local ms, waiter_place
  if state.pttl == -2 then
    local _, _, waiter_claim, _, _, score = first_writer()
    ms, waiter_place = waiter_claim, score
  end
  if waiter_place then waited = string.format('(%.0f', waiter_place - 2^52) end
  if waited and admit_readers(waited) then
    -- Others of them may follow in later batches, after these have left.
    if ms then
      redis.call('HSET', KEYS[1], 'writer_wait_until', now + ms, 'writer_left', string.format('%.0f', waiter_place - 1))
    end
  elseif not is_unfinished and not admit_writer() and not is_unfinished then
    admit_readers('(0')
  end
end
