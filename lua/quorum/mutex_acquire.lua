-- quorum/mutex_acquire: generated from its source in lua/src, do not edit.
-- quorum/mutex_acquire: acquires the mutex, or queues for it, on one node of a quorum.
--
-- KEYS[1]  lock           string: the attempt that holds the mutex, with a TTL
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- KEYS[4]  node           hash: the admission of this node to a guarded quorum; default: no guard
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every lease, the same in each request
-- ARGV[2]  ttl_ms         1 to 9999999999
-- ARGV[3]  proposal       1 to a day ahead of the clock in microseconds: the token to accept;
--                         default: no token
-- ARGV[4]  purpose        nested: also inside a hold with another token; repair: the token of a
--                         lease that is held elsewhere; default: a new lease
-- ARGV[5]  claim_ms       1 to 60000: queue if the mutex is busy; default: do not queue
-- ARGV[6]  channel        where to notify the waiter: ends in "wake:" and 32 hexadecimal digits,
--                         or those and "~"; default: it polls
-- ARGV[7]  queued_at      below 2^52: its place, the same on all nodes; default: now
-- ARGV[8]  grant_before   refuse the attempt from this microsecond on; default: never
-- ARGV[9]  token_ttl_ms   1 to 9999999999: how long the fencing counter is kept; default: 3600000
-- ARGV[10] run            with KEYS[4], the run id of this server; default: no guard
--
-- Returns  token           granted; 0: without a token
--          {pttl, time}    busy: free in at most pttl ms; the server's clock in microseconds
--          -1              refused: the attempt was ended, or comes too late
--          -2              refused: the key holds something else
--          -3              refused: the key has no TTL
--          -5              refused: an argument is malformed
--          {-8, highest}   refused: the proposal is not larger than this token, which the node has
--                          accepted
--          -9              refused: the node was not admitted since it started or lost its data
--
-- The rest is as on one server: mutex/acquire.
local attempt, ttl_ms, proposal, purpose, claim_ms, channel, queued_at, grant_before, token_ttl_ms, run = unpack(ARGV)
local kind = 'mutex'
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

-- The token of a new lease, or nil and a refusal. A lease that is repaired after larger tokens were
-- accepted has none on this node.
local function take_token()
  local is_repair = purpose == 'repair'
  local refusal = proposed and refuse_proposal(is_repair)
  if refusal and (refusal.err or not is_repair) then return nil, refusal end
  note_lease()
  if refusal or not proposed then return 0 end
  return accept(proposed)
end

-- The token of a hold beside or inside another one of its owner: that of the other one, unless the
-- nodes know different ones ("nested"). An attempt may propose its own token again.
local function hold_token(current, is_only, is_new)
  local accepts = proposed and (is_only or purpose == 'nested')
  local refusal = accepts and refuse_proposal(not is_new)
  if refusal and (refusal.err or purpose ~= 'repair') then return nil, refusal end
  note_lease()
  if accepts and not refusal then return accept(proposed) end
  return proposed and current or 0
end

-- The common case: the mutex is free, and no attempt waits.
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token, refusal = take_token()
  if not token then return refusal end
  redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
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

-- The answer while another attempt holds the mutex comes before what only a grant needs.
-- The text by which an attempt is queued.
local function waiter_for(waiter_kind, waiter_owner, waiter_depth)
  if not claim then return '' end
  return attempt .. ' ' .. waiter_kind .. ' ' .. claim_ms .. ' ' .. (channel or '') .. ' '
    .. waiter_owner .. waiter_depth
end
local waiter = waiter_for('mutex', '', '')
-- This attempt was ended, as far as that is remembered. The same call says what a poll must know:
-- its place, and when it was last seen.
local scores = redis.call('ZMSCORE', KEYS[3], 'ended ' .. attempt, waiter, 'seen ' .. attempt)
if (tonumber(scores[1]) or 0) > 2^52 + time then return -1 end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return -2 end
local pttl = holder and redis.call('PTTL', KEYS[1])
if pttl == -1 then return -3 end

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

if holder and holder ~= attempt then
  queue(place or time, 0, scores)
  return {pttl, time}
end

if holder then -- a second delivery, or a poll that finds what a release granted
  local token, refusal = hold_token(nil, true)
  if not token then return refusal end
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

-- The lock is free, but earlier waiters are queued.
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

local function grant(waiter_attempt, _, _, ms)
  redis.call('SET', KEYS[1], waiter_attempt, 'PX', ms)
end

-- Grants the free lock to the waiter of this kind that has waited longest and is alive, for its
-- claim: that ends at a time of the clock that the message is dated by. Waiters of other kinds keep
-- their places, dead ones lose theirs. Returns for how long the lock is busy now, and whether it
-- was granted; nothing if there is no such waiter before this attempt.
--
-- Of a long queue of dead waiters, each call removes some; the lock is busy until all are removed,
-- so that nothing overtakes.
--
-- If there is no token for the waiter, it returns nil, false and a refusal: a release still frees
-- the lock, but no other attempt may be granted it before the waiter.
--
-- A caller that has read the `first` entry of the queue, with its place, passes it.
local new_token
local function grant_next(first)
  local others = 0
  for _ = 1, 128 do
    first = first or redis.pcall('ZRANGE', KEYS[3], others, others, 'WITHSCORES')
    local entry, waiter_place = first[1], tonumber(first[2])
    first = nil
    if not waiter_place or waiter_place >= 2^52 then return nil end
    local next_attempt, waiter_kind, ms, waiter_channel, waiter_owner = parse(entry)
    if next_attempt == attempt then return nil end
    local alive = next_attempt and is_alive(next_attempt, waiter_place, ms)
    if alive and waiter_kind ~= kind then
      others = others + 1
    else
      if alive and not new_token then
        local refusal
        new_token, refusal = next_token()
        if not new_token then return nil, false, refusal end
      end
      redis.call('ZREM', KEYS[3], entry, 'seen ' .. (next_attempt or ''))
      if alive and notify(waiter_channel, message(next_attempt, new_token)) then
        grant(next_attempt, waiter_owner, new_token, ms)
        return tonumber(ms), true
      end
    end
  end
  return 10, false
end

local busy_ms, _, no_token = grant_next()
if no_token then return no_token end
if busy_ms then
  queue(place or time, 0)
  return {busy_ms, time}
end
local token, refusal = take_token(new_token)
if not token then return refusal end
leave_queue(waiter)
redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)
return token
