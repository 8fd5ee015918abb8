-- rwlock/release.lua: give one hold up, or end an attempt whose outcome nobody waits for.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> when a hold ends, and its attempts; more in README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then it starts anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond at which it queued, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: the answer with which this attempt was ended; absent if ended_ms is 0
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire: which hold to give up
-- ARGV[3]  ended_ms  0, or for how long to remember this answer and to refuse the attempt
-- ARGV[4]  floor     a token that is handed over must be larger than this
-- ARGV[5]  waiter    as in acquire, to leave the queue; absent or empty: it is not queued
--
-- Returns  1     released, the last hold of its owner
--          1+n   released; the owner has n holds left
--          0     it held nothing
--          -2    the key holds something that is not a read-write lock
--
-- Whoever may now enter is let in: all readers who waited, or one writer. Delivered twice, it releases once.
-- Where the outcome of an acquire or of a release may stay unknown, send ended_ms: the second answer is then
-- the first one, and a late acquire is refused.
local owner, attempt, ended_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] or ''

-- The common case: nobody waits, and there is nothing to remember.
if ended_ms == 0 and waiter == '' then
  local sole = redis.pcall('HGET', KEYS[1], 'sole')
  if sole == 'read ' .. owner .. ' ' .. attempt or sole == 'write ' .. owner .. ' ' .. attempt then
    redis.call('HDEL', KEYS[1], 'sole')
    return 1
  end
  -- Or one of several readers.
  local state = redis.pcall('HMGET', KEYS[1], 'read:' .. owner, 'readers', 'write')
  local read, readers = state[1], tonumber(state[2] or 0)
  if read and readers > 1 and not state[3] and string.match(read, '^%d+ (%S+)$') == attempt
    and redis.call('EXISTS', KEYS[3]) == 0 then
    redis.call('HDEL', KEYS[1], 'read:' .. owner)
    redis.call('HSET', KEYS[1], 'readers', readers - 1)
    return 1
  end
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- A counter above a floor: INCR is enough until the counter is lost or the clock has passed it.
local function next_token()
  local token = redis.call('INCR', KEYS[2])
  local least = tonumber(floor) or 0
  if token == 1 or token <= least then
    local now = redis.call('TIME')
    token = math.max(least + 1, now[1] * 1000000 + now[2])
    redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', 86400000)
  end
  if token > 9007199254740991 then
    redis.call('DECR', KEYS[2])
    error('the fencing counter is at 2^53')
  end
  return token
end

-- What readers get: that of the last writer, unless it is below the floor, since others may have had larger ones then.
local function readers_token(known)
  local token = tonumber(known or redis.call('GET', KEYS[2]) or '')
  return token and token >= (tonumber(floor) or 0) and token or next_token()
end

-- False also if the key holds something else. Only asked, so that a server that refuses to write says so when it is
-- to write.
local function is_queued()
  return type(redis.pcall('ZSCORE', KEYS[3], waiter)) == 'string'
end

-- Once per attempt: a second delivery gets the first answer, and changes nothing.
-- DEL comes first, since a full server refuses SET as the first write of a script, and must not keep a lock.
local function once(answer)
  if ended_ms > 0 then
    redis.call('DEL', KEYS[4])
    redis.call('SET', KEYS[4], answer, 'PX', ended_ms)
  end
  return answer
end

-- "end word...": the end in ms and the words, or nil once it is over.
local function live(hold)
  local ends, words = string.match(hold or '', '^(%d+) (.+)$')
  if ends and tonumber(ends) > now then return tonumber(ends), words end
end

local function has(attempts, one)
  return string.find(' ' .. attempts .. ' ', ' ' .. one .. ' ', 1, true) ~= nil
end

local function count(attempts)
  return select(2, string.gsub(attempts, '%S+', ''))
end

local function without(attempts, one)
  local rest = {}
  for each in string.gmatch(attempts, '%S+') do
    if each ~= one then rest[#rest + 1] = each end
  end
  return table.concat(rest, ' '), #rest
end

-- The lock is kept until the latest end of a hold.
local function keep_until(ends)
  if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end
end

-- Nobody writes any more: who queued before this goes before the next writer, but not who asks right now. HDEL
-- comes first, since a full server refuses HSET as the first write; and the key must not be empty in between.
local function end_write()
  redis.call('HDEL', KEYS[1], 'upgrade')
  redis.call('HSET', KEYS[1], 'phase', string.format('%.0f', time - 1))
  redis.call('HDEL', KEYS[1], 'write')
end

local function writer_waits()
  return redis.pcall('ZRANGEBYSCORE', KEYS[3], 0, '+inf', 'LIMIT', 0, 1)[1]
end

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

-- A hold that was alone ends with the key, until somebody else comes: from then on it has an end of its own.
-- HDEL comes first, since a full server refuses HSET as the first write of a script.
local function unfold()
  local sole = redis.pcall('HGET', KEYS[1], 'sole')
  local side, its_owner, its_attempt = string.match(type(sole) == 'string' and sole or '', '^(%S+) (%S+) (%S+)$')
  if not side then return end
  local ends = now + math.max(redis.call('PTTL', KEYS[1]), 1)
  redis.call('HDEL', KEYS[1], 'read:')
  if side == 'read' then
    redis.call('HSET', KEYS[1], 'read:' .. its_owner, ends .. ' ' .. its_attempt, 'readers', 1)
  else
    redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. its_owner .. ' ' .. its_attempt)
  end
  local token = side ~= 'unfenced' and redis.pcall('GET', KEYS[2])
  if type(token) == 'string' then redis.call('HSET', KEYS[1], 'fence', token) end
  redis.call('HDEL', KEYS[1], 'sole')
end

-- Fields that mean nothing any more; those of somebody else stay.
local function tidy()
  local state = redis.call('HMGET', KEYS[1], 'write', 'readers')
  if not state[1] and (tonumber(state[2]) or 0) <= 0 then
    redis.call('HDEL', KEYS[1], 'readers', 'fence', 'gate', 'phase', 'upgrade', 'sweep')
  end
end

if ended_ms > 0 then
  local before = redis.call('GET', KEYS[4])
  if before then return tonumber(before) or 0 end
end
unfold()
local state = redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner, 'upgrade')
if waiter ~= '' then
  local left = is_queued() and redis.call('ZREM', KEYS[3], waiter) == 1
  if not state.err and left then
    local _, upgrader = string.match(state[4] or '', '^(%d+) (.+)$')
    if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
    if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
  end
end
if state.err then return once(-2) end
local write_ends, writes, write = string.match(state[1] or '', '^(%d+) (%S+) (.+)$')
local read_ends, read = string.match(state[3] or '', '^(%d+) (.+)$')
if writes ~= owner then write = nil end
local writing, reading = write and has(write, attempt), read and has(read, attempt)
local answer = 0
if writing then
  local rest, left = without(write, attempt)
  write = left > 0 and rest
  if write then
    redis.call('HDEL', KEYS[1], 'read:')
    redis.call('HSET', KEYS[1], 'write', write_ends .. ' ' .. owner .. ' ' .. rest)
  else
    end_write()
  end
end
if reading then
  local rest, left = without(read, attempt)
  read = left > 0 and rest
  if read then
    redis.call('HDEL', KEYS[1], 'read:')
    redis.call('HSET', KEYS[1], 'read:' .. owner, read_ends .. ' ' .. rest)
  else
    redis.call('HDEL', KEYS[1], 'read:' .. owner)
    redis.call('HINCRBY', KEYS[1], 'readers', -1)
  end
end
if writing or reading then
  answer = 1 + (write and count(write) or 0) + (read and count(read) or 0)
end
once(answer)
let_in()
if state[1] or state[2] then tidy() end -- else the key may be anything
return answer
