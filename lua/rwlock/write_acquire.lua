-- rwlock/write_acquire.lua: write, write once more, or queue to write.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     the token must be larger than this number; empty: no token
-- ARGV[5]  limit     how many holds the owner may have to write
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     ignored: one owner writes
--
-- Returns  token          granted; 0 without fencing
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -6             refused: the owner and another reader both wait to write: a deadlock
--
-- Busy: another owner writes or reads. Queued, it keeps new readers out for claim_ms after a poll.
-- A further hold of the same owner keeps the token. An owner that reads is granted the lock once it
-- is the only reader.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
local hold_of = owner .. ' ' .. attempt
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(hold_of, '^%S+ %S+$')) then
  return -5
end
-- A proposed token belongs to the scripts for quorums.
if (string.byte(floor) or 0) > 57 then return -5 end

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

-- The common case: the lock is free, and nothing waits for it.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local token = floor ~= '' and next_token() or 0
  redis.call('HSET', KEYS[1], 'sole', (floor ~= '' and 'write ' or 'unfenced ') .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local queued_at = time
local ends = now + ttl_ms

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
local heir, claim_ms, its_owner = string.match(waiter, '^(%S+) ([1-9]%d?%d?%d?%d?) (%S+) %S*$')
if waiter ~= '' and (heir ~= attempt or its_owner ~= owner) then return -5 end
local waiting = redis.call('ZCARD', KEYS[3])
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

-- Removes readers whose time is over, some hundred at most, going on where the last look stopped, until it finds
-- others than the owner who still read: when those found will be over, or at once if there is more to look at.
-- Nil: there is none, since all were seen in this look, or all that were counted are gone.
local function other_reader()
  local reads = live(redis.call('HGET', KEYS[1], 'read:' .. owner)) and 1 or 0
  local began = redis.call('HGET', KEYS[1], 'sweep') or '0'
  local cursor, pages, latest = began, 0, nil
  local left = tonumber(redis.call('HGET', KEYS[1], 'readers')) or 0
  repeat
    local page, over = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', pages == 0 and 16 or 256), {}
    if page[1] == '0' or pages == 2 then redis.call('HDEL', KEYS[1], 'sweep') end
    cursor, pages = page[1], pages + 1
    for i = 1, #page[2], 2 do
      local field, ends = page[2][i], live(page[2][i + 1])
      if string.sub(field, 1, 5) == 'read:' then
        if not ends then
          over[#over + 1] = field
        elseif field ~= 'read:' .. owner then
          latest = math.max(latest or 0, ends)
        end
      end
    end
    if over[1] then left = redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(over))) end
  until latest or cursor == '0' or pages == 3
  if latest then return latest end
  if left > reads and not (began == '0' and cursor == '0') then
    if cursor ~= '0' then redis.call('HSET', KEYS[1], 'sweep', cursor) end
    return now + 1
  end
  if reads == 0 then redis.call('HDEL', KEYS[1], 'readers') else redis.call('HSET', KEYS[1], 'readers', 1) end
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

local function look()
  return redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner, 'upgrade', 'gate')
end
local state = look()
if state.err then return -2 end
if redis.call('PTTL', KEYS[1]) == -1 then return -3 end
-- Fields that nobody here knows are a later version's, but for those of other kinds of locks: ours, and Redisson's.
local function is_foreign()
  local kinds = redis.call('HMGET', KEYS[1], ':fence', 'mode')
  local some = redis.call('HRANDFIELD', KEYS[1])
  return kinds[1] or kinds[2] or string.match(some or '', '^[%x-]+:%d+$')
end

if not (state[1] or state[2] or redis.call('HEXISTS', KEYS[1], 'sole') == 1) and is_foreign() then return -2 end
unfold()
state = look()
-- A late delivery of what was downgraded since: it reads, and must not begin to write again.
local _, reads_by = live(state[3])
if reads_by and has(reads_by, attempt) then return tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) end
local function others_read()
  return (tonumber(state[2]) or 0) > (state[3] and 1 or 0)
end
local other_ends
if not live(state[1]) then
  other_ends = others_read() and other_reader()
  state = look()
  if waiting > 0 and not other_ends and not live(state[3]) then
    let_in()
    state = look()
    other_ends = others_read() and now + math.max(redis.call('PTTL', KEYS[1]), 1)
  end
end

local reads = live(state[3])
local write_ends, write = live(state[1])
local writes, attempts = string.match(write or '', '^(%S+) (.+)$')

-- A hold of an owner who writes already. A second delivery counts once.
local nested = writes == owner
if nested then
  if not has(attempts, attempt) then
    if count(attempts) >= tonumber(ARGV[5]) then return -4 end
    attempts = attempts .. ' ' .. attempt
  end
  ends = math.max(ends, write_ends)
elseif write or other_ends then
  if waiter ~= '' then
    local upgrades = not write and reads
    local _, upgrader = live(state[4])
    if upgrades and upgrader and upgrader ~= owner and live(redis.call('HGET', KEYS[1], 'read:' .. upgrader)) then
      return -6
    end
    if upgrades then
      redis.pcall('ZADD', KEYS[3], 0, waiter) -- before all other writers: they wait for this reader
    else
      redis.pcall('ZADD', KEYS[3], 'NX', string.format('%.0f', queued_at), waiter)
    end
    redis.call('PEXPIRE', KEYS[3], 60000)
    redis.call('HSET', KEYS[1], 'gate', math.max(now + claim_ms, tonumber(state[5]) or 0))
    if upgrades then redis.call('HSET', KEYS[1], 'upgrade', now + claim_ms .. ' ' .. owner) end
  end
  return {(write_ends or other_ends) - now, time}
end

local known = nested and redis.call('HGET', KEYS[1], 'fence')
local token = tonumber(known or floor ~= '' and next_token() or 0)
redis.call('HSET', KEYS[1], 'write', ends .. ' ' .. owner .. ' ' .. (nested and attempts or attempt))
keep_until(ends)
if waiter ~= '' then redis.call('ZREM', KEYS[3], waiter) end
if token > 0 then
  redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token))
elseif not nested then
  redis.call('HDEL', KEYS[1], 'fence')
end
if nested then
  if state[5] and not writer_waits() then redis.call('HDEL', KEYS[1], 'gate') end
  return token
end
local _, upgrader = live(state[4])
if upgrader == owner then redis.call('HDEL', KEYS[1], 'upgrade') end
if not writer_waits() then redis.call('HDEL', KEYS[1], 'gate', 'upgrade') end
return token
