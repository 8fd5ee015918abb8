-- quorum/read_acquire: generated from its source in lua/src, do not edit.
-- quorum/read_acquire: acquires the lock to read, or queues for it, on one node of a quorum.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- KEYS[4]  node           hash: the admission of this node to a guarded quorum; default: no guard
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every hold, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  owner          up to 256 bytes, no space, not beginning with ":"; default: the attempt
-- ARGV[4]  proposal       1 to a day ahead of the clock in microseconds: the token to accept;
--                         default: no token
-- ARGV[5]  purpose        nested: also inside a hold with another token; repair: the token of a
--                         lease that is held elsewhere; default: a new lease
-- ARGV[6]  claim_ms       1 to 60000: queue if the lock is busy; default: do not queue
-- ARGV[7]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[8]  max_depth      1 to 1024: how many holds to read the owner may have; default: 255
-- ARGV[9]  queued_at      below 2^52: its place, the same on all nodes; default: now
-- ARGV[10] grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[11] token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
-- ARGV[12] run            with KEYS[4], the run id of this server; default: no guard
-- ARGV[13] max_readers    1 to 100000: how many may read or wait; default: 10000
--
-- Returns  token          granted: the largest that the node knows; if it is larger than the
--                         proposal, propose it to all nodes
--          {pttl, time}   busy: poll again in pttl ms at most; the server's clock in microseconds
--          -1             refused: the attempt was ended, or comes too late
--          -2             refused: the key holds something else
--          -3             refused: the key has no TTL
--          -4             refused: the owner has max_depth holds to read
--          -5             refused: an argument is malformed
--          -7             refused: max_readers read or wait
--          -9             refused: the node was not admitted since it started or lost its data
--
-- The rest is as on one server: rwlock/read_acquire.
local attempt, ttl_ms, owner, proposal, purpose, claim_ms, channel, max_depth, queued_at, grant_before,
  token_ttl_ms, run, max_readers = unpack(ARGV)
local kind = 'read'
-- Every argument is checked on every path, before the first write.
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
local claim
if claim_ms and claim_ms ~= '' then
  claim = #claim_ms <= 5 and string.find(claim_ms, '^[1-9]%d*$') and tonumber(claim_ms)
  if not claim or claim > 60000 then return -5 end
end
if channel and channel ~= '' then
  -- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
  -- no other one: a release publishes with the rights of its own user, for whatever was queued.
  local function is_channel(text)
    return #text >= 37 and string.find(text, '^wake:%x+$', -37)
      or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
  end
  if not is_channel(channel) or #channel > 256 or string.find(channel, ' ', 1, true) then return -5 end
end
if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
local place
if queued_at and queued_at ~= '' then
  place = string.find(queued_at, '^[1-9]%d*$') and tonumber(queued_at)
  if not place or place >= 2^52 then return -5 end
end
if grant_before and grant_before ~= '' then
  local instant = string.find(grant_before, '^%d+$') and redis.call('TIME')
  if not instant then return -5 end
  if instant[1] * 1000000 + instant[2] >= tonumber(grant_before) then return -1 end
end
local proposed, minimum = nil, nil
if proposal and proposal ~= '' then
  local instant = redis.call('TIME')
  proposed = string.find(proposal, '^[1-9]%d*$') and tonumber(proposal)
  if not proposed or proposed > (instant[1] + 86400) * 1000000 then return -5 end
end
if purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair' then return -5 end
if not owner or owner == '' then
  owner = attempt
elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
  return -5
end
local depth = 255
if max_depth and max_depth ~= '' then
  depth = #max_depth <= 4 and string.find(max_depth, '^[1-9]%d*$') and tonumber(max_depth)
  if not depth or depth > 1024 then return -5 end
end
local reader_limit = 10000
if max_readers and max_readers ~= '' then
  reader_limit = #max_readers <= 6 and string.find(max_readers, '^[1-9]%d*$') and tonumber(max_readers)
  if not reader_limit or reader_limit > 100000 then return -5 end
end

-- A node that restarted or lost its data has no vote until it is admitted again.
local node
if KEYS[4] then
  node = redis.call('HMGET', KEYS[4], 'run', 'min_token', 'high', 'ttl')
  if node[1] ~= run then return -9 end
end

-- Before each grant: the longest lease, which the admission of a node waits for.
local function note_lease()
  if node and tonumber(ttl_ms) > tonumber(node[4] or 0) then redis.call('HSET', KEYS[4], 'ttl', ttl_ms) end
end

-- The client chooses the token, and more than half of the nodes must accept it. (On one server, the
-- server chooses: tokens.lua.)

-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end

-- The largest token that this node had accepted, or was given when it was admitted, before this
-- request.
local highest

-- Why this node does not accept the proposal; nil: it does.
local function refuse_proposal(again)
  local accepted, minimum = to_token(redis.call('GET', KEYS[2]) or '0'), to_token(node and node[2] or '0')
  if not accepted or not minimum then return redis.error_reply('ERR the largest accepted token is spoilt') end
  highest = math.max(accepted, minimum)
  if proposed < highest or proposed == highest and not again then return {-8, highest} end
end

local function accept(token)
  if node and token > tonumber(node[3] or 0) then
    redis.call('HSET', KEYS[4], 'high', string.format('%.0f', token))
  end
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

-- Reads the fields of the lock. Returns a refusal if the key holds something else.
local state = {}
local function read_state()
  local found = redis.pcall('HMGET', KEYS[1], 'mode', 'write', 'readers', 'read:' .. owner, 'token',
    'writer_wait_until', 'upgrade', 'writer_left')
  if found.err then return -2 end
  state = {
    mode = found[1], write = found[2], readers = tonumber(found[3]) or 0, read = found[4], token = found[5],
    wait_until = tonumber(found[6]) or 0, upgrade = found[7], writer_left = tonumber(found[8]),
    pttl = redis.call('PTTL', KEYS[1]),
  }
  if state.pttl == -1 then return -3 end
  local is_ours = state.mode == 'several' or string.find(state.mode or '', '^sole ')
  if state.pttl ~= -2 and not is_ours then return -2 end
end

-- The token of a hold to read: the proposal, or the largest accepted token. It is larger than the
-- tokens of all writers before and, once a majority knows it, smaller than those of all after.
-- Inside a hold to write, it is that of the latter.
local function nested_read_token(writes)
  local token = writes and purpose ~= 'nested' and to_token(state.token)
  local refusal = proposed and not token and refuse_proposal(true)
  if refusal and refusal.err then return nil, refusal end
  note_lease()
  if not proposed then return 0 end
  return token or accept(math.max(proposed, highest))
end

-- The common case: the lock is free, and no attempt waits.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3])
if keys == 0 then
  local token, refusal = nested_read_token()
  if not token then return refusal end
  redis.call('HSET', KEYS[1], 'mode', 'sole read ' .. owner .. ' ' .. attempt)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

-- A counter above min_token: INCR suffices until the counter is lost or the clock has passed it.
-- Nil and a refusal if the counter is spoilt, or min_token is more than a day ahead of the clock.
local function next_token()
  local token = redis.pcall('INCR', KEYS[2])
  if type(token) == 'table' then return nil, token end
  if token > 1 and token > (minimum or 0) and token < 2^53 then return token end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  if token >= 2^53 or (minimum or 0) > time + 86400000000 then
    if token == 1 then redis.call('DEL', KEYS[2]) else redis.call('DECR', KEYS[2]) end
    return nil, token >= 2^53 and redis.error_reply('ERR the fencing counter is at 2^53') or -5
  end
  token = math.max((minimum or 0) + 1, time)
  redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', token_ttl_ms)
  return token
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)

-- Readers get the token of the last writer, unless it is below min_token: others may have had
-- larger ones then.
local function new_read_token(known)
  local last = known or redis.pcall('GET', KEYS[2])
  if type(last) == 'table' then return nil, last end
  local token = to_token(last)
  if token and token >= (minimum or 0) then return token end
  return next_token()
end

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

-- A hold, `end word...`: the millisecond at which it ends, and the words; nothing once it has
-- expired.
local function unexpired(hold)
  local ends, words = string.match(hold or '', '^(%d+) (.+)$')
  if ends and tonumber(ends) > now then return tonumber(ends), words end
end

local function has(attempts, one)
  return string.find(' ' .. attempts .. ' ', ' ' .. one .. ' ', 1, true) ~= nil
end

local function count(attempts)
  return select(2, string.gsub(attempts, '[^ ]+', ''))
end

-- The key lasts until the latest end of a hold.
local function keep_until(ends)
  if redis.call('PTTL', KEYS[1]) < ends - now then redis.call('PEXPIREAT', KEYS[1], ends) end
end

-- The lock has no writer any more. Readers that queued before this go before the next writer, but
-- not those that ask right now. HDEL comes first, since a full server refuses HSET as the first
-- write.
local function end_write()
  redis.call('HDEL', KEYS[1], 'upgrade')
  redis.call('HSET', KEYS[1], 'writer_left', string.format('%.0f', time - 1))
  redis.call('HDEL', KEYS[1], 'write')
end

-- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
-- no other one: a release publishes with the rights of its own user, for whatever was queued.
local function is_channel(text)
  return #text >= 37 and string.find(text, '^wake:%x+$', -37)
    or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
end

-- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol. A
-- claim of 20 digits, or one that begins with 0, would make the grant fail after the release has
-- written its answer. The claim stays a text, since the server formats each number that it gets.
local function parse(entry)
  local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth =
    string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]*) ?(%d*)$')
  if not ms or tonumber(ms) > 60000 then return nil end
  if waiter_channel ~= '' and not is_channel(waiter_channel) then return nil end -- written by hand
  return waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark.
local function is_alive(waiter_attempt, waiter_place, ms)
  if waiter_place < 0 then waiter_place = waiter_place + 2^52 end
  -- A waiter also counts as alive if the clock was set back a little.
  if math.abs(time - waiter_place) < ms * 1000 then return true end
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. waiter_attempt)) or 0) > 2^52 + 61000000 + time
end

-- The text by which an attempt is queued.
local function waiter_for(waiter_kind, waiter_owner, waiter_depth)
  if not claim then return '' end
  return attempt .. ' ' .. waiter_kind .. ' ' .. claim_ms .. ' ' .. (channel or '') .. ' '
    .. waiter_owner .. waiter_depth
end
local waiter = waiter_for('read', owner ~= attempt and owner or '', ' ' .. depth)
-- Removes marks that have expired, and those of some random waiters that are dead. Of sixteen or
-- more, if a quarter was dead, it looks at further ones, but for less than 5 ms.
local function remove_dead(size)
  -- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
  -- no other one: a release publishes with the rights of its own user, for whatever was queued.
  local function is_channel(text)
    return #text >= 37 and string.find(text, '^wake:%x+$', -37)
      or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
  end

  -- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol. A
  -- claim of 20 digits, or one that begins with 0, would make the grant fail after the release has
  -- written its answer. The claim stays a text, since the server formats each number that it gets.
  local function parse(entry)
    local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth =
      string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]*) ?(%d*)$')
    if not ms or tonumber(ms) > 60000 then return nil end
    if waiter_channel ~= '' and not is_channel(waiter_channel) then return nil end -- written by hand
    return waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner, waiter_depth
  end

  -- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
  -- polls leave a mark.
  local function is_alive(waiter_attempt, waiter_place, ms)
    if waiter_place < 0 then waiter_place = waiter_place + 2^52 end
    -- A waiter also counts as alive if the clock was set back a little.
    if math.abs(time - waiter_place) < ms * 1000 then return true end
    return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. waiter_attempt)) or 0) > 2^52 + 61000000 + time
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[3], 2^52, 2^52 + time)
  for _ = 1, 4 do
    local some, dead = redis.call('ZRANDMEMBER', KEYS[3], size, 'WITHSCORES'), {}
    for i = 1, #some, 2 do
      local score = tonumber(some[i + 1])
      if score < 2^52 then
        local waiter_attempt, _, ms = parse(some[i])
        if not (waiter_attempt and is_alive(waiter_attempt, score, ms)) then dead[#dead + 1] = some[i] end
      end
    end
    if dead[1] then redis.call('ZREM', KEYS[3], unpack(dead)) end
    if size < 16 or #dead * 4 < size then return end
    size = 128
  end
end

-- Queues the attempt at a place; or, if it polls, notes that it was seen, which counts for one
-- claim. A poll also removes marks that have expired, and some dead waiters, wherever they are in
-- the queue. So does a new waiter of a long queue, since clients that crash in a loop never poll.
-- `scores` are those that were just read, if nothing was removed since.
local function queue(at, lane, scores)
  if not claim then return end
  local is_queued = scores and scores[2]
  local added = is_queued and 0 or redis.call('ZADD', KEYS[3], 'NX', at + lane, waiter)
  -- The score is above all end marks, so that the oldest of those are found first.
  local mark = 2^52 + 61000000 + time + claim * 1000
  local polls = added == 0 or at ~= time
  if polls then redis.call('ZADD', KEYS[3], mark, 'seen ' .. attempt) end
  -- The queue is kept for a minute. For usual claims, one poll in ten seconds suffices for that.
  -- ZADD comes first: a full server refuses it only as the first write of a script.
  local last_mark = is_queued and tonumber(scores[3])
  local is_kept = last_mark and claim <= 30000 and math.floor(last_mark / 10^7) == math.floor(mark / 10^7)
  if not is_kept then redis.call('PEXPIRE', KEYS[3], '60000') end
  if polls and redis.call('ZCARD', KEYS[3]) == 2 then return end -- this waiter and its mark
  if added == 1 and redis.call('ZCOUNT', KEYS[3], '-inf', '(4503599627370496') < 128 then return end
  remove_dead(added == 1 and 2 or 16)
end

-- The attempt is removed only if it is queued: a server that refuses writes then reports that
-- only if there is something to write.
local function leave_queue(waiter)
  if not claim or type(redis.pcall('ZSCORE', KEYS[3], waiter)) ~= 'string' then return false end
  redis.call('ZREM', KEYS[3], waiter, 'seen ' .. attempt)
  return true
end

-- `attempt,attempt token time lock`: which attempts were granted the lock, with which token, at
-- which microsecond.
local function message(attempts, granted_token)
  return attempts .. string.format(' %.0f ', granted_token)
    .. clock[1] .. string.format('%06d ', clock[2]) .. KEYS[1]
end

-- False: the channel has no subscriber, so the waiter is dead. Where a channel ends in "~", the
-- waiter may listen to another node of a cluster, which PUBLISH does not count.
--
-- An error is a channel that this user may not publish to. The message is not replicated:
-- subscribers of a replica are not in our count, and must not be notified of a lock that is granted
-- to the next waiter.
local function notify(waiter_channel, text)
  if waiter_channel == '' then return true end
  redis.set_repl(redis.REPL_NONE)
  local receivers = redis.pcall('PUBLISH', waiter_channel, text)
  redis.set_repl(redis.REPL_ALL)
  return receivers ~= 0 or string.sub(waiter_channel, -1) == '~'
end

-- The number of waiters that one script checks is bounded. While there are more of them, the lock
-- is busy, so that nothing overtakes those behind.
local checks_left, is_unfinished = 128, false

-- The writer that has waited longest and is alive. Dead ones before it leave the queue, other kinds
-- keep their places.
local function first_writer()
  local others = 0
  while checks_left > 0 do
    checks_left = checks_left - 1
    local first =
      redis.pcall('ZRANGEBYSCORE', KEYS[3], 0, '(4503599627370496', 'WITHSCORES', 'LIMIT', others, 1)
    if not first[1] then return nil end
    local waiter_attempt, waiter_kind, ms, waiter_channel, waiter_owner = parse(first[1])
    if waiter_attempt and is_alive(waiter_attempt, tonumber(first[2]), ms) then
      if waiter_kind == 'write' then
        if waiter_owner == '' then waiter_owner = waiter_attempt end
        return first[1], waiter_attempt, ms, waiter_channel, waiter_owner, tonumber(first[2])
      end
      others = others + 1
    else
      redis.call('ZREM', KEYS[3], first[1], 'seen ' .. (waiter_attempt or ''))
    end
  end
  is_unfinished = true
end

-- False also if there are too many waiters to check: new readers must then stay out.
local function no_writer_waits()
  return not first_writer() and not is_unfinished
end

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

-- A hold that is alone is the field `mode`, and ends with the key. When another one comes, it gets
-- a field and an end of its own. HDEL comes first, since a full server refuses HSET as the first
-- write of a script.
local function expand_sole_hold()
  local side, holder_owner, holder_attempt = string.match(state.mode or '', '^sole ([^ ]+) ([^ ]+) ([^ ]+)$')
  if not side then return end
  local hold = now + math.max(state.pttl, 1) .. ' '
  redis.call('HDEL', KEYS[1], 'read:')
  if side == 'read' then
    redis.call('HSET', KEYS[1], 'mode', 'several', 'read:' .. holder_owner, hold .. holder_attempt, 'readers', 1)
  else
    redis.call('HSET', KEYS[1], 'mode', 'several', 'write', hold .. holder_owner .. ' ' .. holder_attempt)
  end
  local last_token = side == 'read' and redis.pcall('GET', KEYS[2])
  if type(last_token) == 'string' then redis.call('HSET', KEYS[1], 'token', last_token) end
  read_state()
end

-- Returns the latest end of another owner's hold to read; the next millisecond if readers remain
-- unchecked; nil if there is none. Many readers are checked by a random sample, and its expired
-- ones are removed.
local function other_reader()
  local size = redis.call('HLEN', KEYS[1])
  local sample = redis.call('HRANDFIELD', KEYS[1], size > 512 and 32 or size, 'WITHVALUES')
  local expired, latest = {}, nil
  for i = 1, #sample, 2 do
    if string.sub(sample[i], 1, 5) == 'read:' then
      local ends = unexpired(sample[i + 1])
      if not ends then
        expired[#expired + 1] = sample[i]
      elseif sample[i] ~= 'read:' .. owner then
        latest = math.max(latest or 0, ends)
      end
    end
  end
  if expired[1] then
    redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(expired)))
  end
  if latest or size > 512 then return latest or now + 1 end
  local reads = redis.call('HEXISTS', KEYS[1], 'read:' .. owner)
  if reads == 0 then redis.call('HDEL', KEYS[1], 'readers') else redis.call('HSET', KEYS[1], 'readers', 1) end
end

-- This attempt was ended, as far as that is remembered. The same call says what a poll must know:
-- its place, and when it was last seen.
local scores = redis.call('ZMSCORE', KEYS[3], 'ended ' .. attempt, waiter, 'seen ' .. attempt)
if (tonumber(scores[1]) or 0) > 2^52 + time then return -1 end
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
