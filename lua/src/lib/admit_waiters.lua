-- How many dead waiters one script passes over is bounded.
local passes = 0

-- Grants what the lock is free for, each time for a claim: to all readers who queued before the last writer
-- left; else to the oldest writer; else to all readers. Beside readers, to more of them while no writer waits, and
-- to the one who waits for the others to leave.
-- One message for each client: PUBLISH answers how many heard it. 0 is a client that is gone, unless its channel ends
-- in "~": then it listens to another node of a cluster. An error is a denied channel. It comes before the grant, which
-- cannot fail: after a first write, no memory is asked for.
local function let_in()
  if redis.call('EXISTS', KEYS[3]) == 0 then return end
  local state = redis.call('HMGET', KEYS[1], 'write', 'readers', 'gate', 'phase', 'upgrade', 'fence')
  if live(state[1]) then return end
  local readers = tonumber(state[2]) or 0
  local gated = (tonumber(state[3]) or 0) > now
  local phase, upgrade, fence = tonumber(state[4]), state[5], state[6]
  if state[1] then -- its writer is dead
    end_write()
    phase = time - 1
  end
  local function hears(channel, heirs, token, at)
    if channel == '' then return true end
    -- Not passed on to replicas: who listens to one is not counted, and must not hear that he has what others get.
    redis.set_repl(redis.REPL_NONE)
    local heard = redis.pcall('PUBLISH', channel, string.format('%s %.0f %.0f ', heirs, token, at) .. KEYS[1])
    redis.set_repl(redis.REPL_ALL)
    return heard ~= 0 or string.sub(channel, -1) == '~'
  end
  local function claim(waiting)
    local heir, ms, its_owner, channel = string.match(waiting, '^(%S+) (%d%d?%d?%d?%d?) (%S+) ?(.*)$')
    if waiting == waiter then channel = '' end
    if heir and tonumber(ms) > 0 then return heir, now + ms, its_owner, channel end
  end

  -- The rest, beyond one batch: the first of them who hears it asks, and lets in the next batch.
  local function go_on(latest)
    for _, each in ipairs(redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', latest, 'LIMIT', 0, 64)) do
      local heir, _, _, channel = claim(each)
      if heir and channel ~= '' and hears(channel, heir, 0, 0) then return end
    end
  end

  -- False once nobody is queued, or too many were dead.
  local function admit_readers(latest)
    passes = passes + 1
    local waiting = redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', latest, 'LIMIT', 0, 128)
    if passes > 3 or not waiting[1] then return false end
    local known, token = pcall(readers_token, fence)
    if not known then return false end
    redis.call('ZREM', KEYS[3], unpack(waiting))
    local told = {}
    for _, each in ipairs(waiting) do
      local heir, ends, its_owner, channel = claim(each)
      if heir then
        told[channel] = told[channel] or {heirs = {}, owners = {}, ends = {}}
        table.insert(told[channel].heirs, heir)
        table.insert(told[channel].owners, its_owner)
        table.insert(told[channel].ends, ends)
      end
    end
    local holds, last = {}, now
    for channel, some in pairs(told) do
      if hears(channel, table.concat(some.heirs, ','), token, time) then
        for i, its_owner in ipairs(some.owners) do
          local hold = holds[its_owner]
          if not hold then
            local before = redis.call('HGET', KEYS[1], 'read:' .. its_owner)
            local ends, attempts = live(before)
            if not before then readers = readers + 1 end
            hold = {ends = ends or 0, attempts}
            holds[its_owner] = hold
          end
          hold.ends = math.max(hold.ends, some.ends[i])
          hold[#hold + 1] = some.heirs[i]
          last = math.max(last, hold.ends)
        end
      end
    end
    if not next(holds) then return admit_readers(latest) end
    for its_owner, hold in pairs(holds) do
      redis.call('HSET', KEYS[1], 'read:' .. its_owner, hold.ends .. ' ' .. table.concat(hold, ' '))
    end
    redis.call('HSET', KEYS[1], 'readers', readers, 'fence', string.format('%.0f', token))
    keep_until(last)
    if #waiting == 128 then go_on(latest) end
    return true
  end

  local function admit_writer(reader)
    local minted, token
    for _ = 1, reader and 1 or 64 do
      local waiting = writer_waits()
      if not waiting then
        redis.call('HDEL', KEYS[1], 'gate', 'upgrade')
        return false
      end
      local heir, ends, its_owner, channel = claim(waiting)
      if reader and its_owner ~= reader then return false end
      if not minted then minted, token = pcall(next_token) end
      if not minted then return false end
      redis.call('ZREM', KEYS[3], waiting)
      redis.call('HDEL', KEYS[1], 'upgrade')
      if heir and hears(channel, heir, token, time) then
        redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. its_owner .. ' ' .. heir,
          'fence', string.format('%.0f', token))
        if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
        keep_until(ends)
        return true
      end
    end
    return false
  end

  local waited = phase and string.format('%.0f', phase - 4503599627370496)
  if readers > 0 then
    if not gated then
      if admit_readers('(0') then return end
    elseif waited and admit_readers(waited) then
      return
    else
      local _, its_owner = live(upgrade)
      local alone = readers == 1 and its_owner and redis.call('HEXISTS', KEYS[1], 'read:' .. its_owner) == 1
      if alone and admit_writer(its_owner) then return end
      if not writer_waits() then
        redis.call('HDEL', KEYS[1], 'gate', 'upgrade')
        admit_readers('(0')
      end
    end
    return
  end
  -- Everything but the queue has ended with its ttl: then age decides, and the writer's gate is his again.
  local first = redis.call('EXISTS', KEYS[1]) == 0 and writer_waits()
  if first then waited = string.format('(%.0f', redis.call('ZSCORE', KEYS[3], first) - 4503599627370496) end
  if waited and admit_readers(waited) then
    local _, ends = claim(first or '')
    if ends then redis.call('HSET', KEYS[1], 'gate', ends) end
  elseif not admit_writer() then
    admit_readers('(0')
  end
end
