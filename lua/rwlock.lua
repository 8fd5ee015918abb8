-- redlatch, wire version 1: the read-write lock. Licence: MIT OR Apache-2.0.
--
-- Many owners read, or one writes. Readers and writers that find the lock in use may queue: a
-- release grants it to the next of them, and notifies these. README.md says what a client does with
-- the answers. Each lock has three keys:
--
--   lock     lock:backup              hash; its TTL outlasts every hold. The only hold is
--                                       mode    sole read <owner> <attempt>, or
--                                               sole write <owner> <attempt>
--                                     and ends with the key. Once there was another one:
--                                       mode              several
--                                       write             <end> <owner> <attempt>...
--                                       read:<owner>      <end> <attempt>...
--                                       readers           how many fields read:<owner> there are
--                                       writer_wait_until new readers stay out: a writer waits
--                                       upgrade           <end> <owner>: it reads, and waits to
--                                                         write
--                                       writer_left       the microsecond before the last writer
--                                                         left
--                                     in both cases:
--                                       token             of the writer, its first; of readers: the
--                                                         last one of the last writer, or a larger
--                                                         one; default: that of the fence
--                                     Ends are milliseconds of the server's clock.
--   waiters  {lock:backup}:waiters    sorted set, by score:
--                                       attempt read claim_ms channel owner max_depth
--                                                         a waiter, at its place - 2^52; its place
--                                                         is the microsecond at which it queued
--                                       attempt write claim_ms channel owner max_depth [tokens]
--                                                         a waiter, at its place; at 0: its owner
--                                                         reads
--                                       ended attempt     2^52 + second to keep it, in
--                                                         microseconds + answer + 10
--                                       seen attempt      2^52 + 61000000 + when the waiter counts
--                                                         as dead
--                                     Waiters of other kinds keep their places.
--   fence    {lock:backup}:fence      string: the last fencing token, a number that grows
--
-- One call serves 1 to 128 locks, which need not belong together, in order:
--
--   EVALSHA sha1 numkeys  lock... waiters... fence... [node]
--     verb  <first word of each lock>... <second word of each lock>...  words shared by all locks
--
--   verb       words of each lock                 shared words
--   read       attempt owner queued_at proposal   ttl_ms [min_token claim_ms channel max_depth
--                                                 grant_before token_ttl_ms max_readers all
--                                                 purpose run]
--   write      attempt owner queued_at proposal   ttl_ms [min_token claim_ms channel max_depth
--                                                 grant_before token_ttl_ms tokens all purpose run]
--   renew      attempt owner                      ttl_ms [successor run]
--   release    attempt owner last_token           [min_token remember claim_ms channel max_depth
--                                                 token_ttl_ms tokens force only_from keep_ms]
--   downgrade  attempt owner                      ttl_ms [min_token token_ttl_ms tokens last_token]
--   inspect                                       [owner]
--   wait       attempt owner, of 1 to 1024        claim_ms channel max_depth
--              waiters of one lock
--
-- An empty word is the default, and trailing shared words may be left out. The answer is a list
-- with one answer for each lock. An error of one lock is its answer, as a text; the only lock of a
-- call answers it as an error. The integer -5 instead of a list: the call as a whole is malformed.
--
--   attempt       up to 128 bytes, no space; new for every hold, the same in each request of it,
--                 as are owner, claim_ms, channel, max_depth and tokens; with all, no claim_ms
--   owner         up to 256 bytes, no space, not beginning with ":"; default: the attempt
--   queued_at     1 to 2^52 - 1: the waiter's place, when it was first answered busy; default: now
--   proposal      quorum: the token to accept, 1 to a day ahead of the clock in microseconds
--   last_token    0 to 2^53 - 1: of several tokens that were reserved, the last one used, or if the
--                 owner is the attempt, 0 for none: the counter goes back to it if this was the
--                 owner's last hold. Empty if write answered 0; never 0 for a successor
--   ttl_ms        1 to 9999999999, counted from now
--   min_token     below 2^52, usually the clock in microseconds: the token of a writer is larger
--                 than this, that of a reader is at least this, unless a release grants it;
--                 default: no token. In each release or downgrade: the token of the next waiter is
--                 larger; default: 0, also for one more than a day ahead of the clock; in a release
--                 also for one malformed or too large
--   claim_ms      1 to 60000: queue if the lock is in use, and keep it so long for the waiter that
--                 it is granted to; a waiter that did not poll for so long is dead; default: do
--                 not queue. In a release: also leave the queue, with the channel, max_depth and
--                 tokens of read or write
--   channel       where to publish "attempt token microsecond lock" for the waiter: up to 256
--                 bytes, no space, ends in "wake:" and 32 hexadecimal digits, and "~" in a cluster,
--                 which does not count all subscribers; default: the waiter polls
--   max_depth     1 to 1024: how many holds the owner may have on this side; default: 255
--   grant_before  refuse the attempts from this microsecond on; default: never
--   token_ttl_ms  1 to 9999999999: how long a new counter is kept; default: 3600000
--   max_readers   1 to 100000: how many may read, or wait; default: 10000
--   tokens        1 to 1000: how many tokens to reserve, with min_token or proposal; default: 1; a
--                 nested hold reserves none. In a release or downgrade: as in write
--   all           1: all locks or none; not with claim_ms. Default: each for itself
--   purpose       quorum: "nested" (also inside a hold with another token) or "repair" (a lease
--                 that other nodes hold); default: a new lease
--   run           with the key node, of node.lua: the run id of this server, admitted before;
--                 a downgrade takes the key without this word
--   remember      1: refuse the attempt from now on, and repeat this answer, for a minute (of one
--                 lock, for the newest 19,000 attempts). If it may be queued, with claim_ms
--   force         "read" or "write": revoke the holds of all readers, or of the writer; attempt is
--                 new for the call; implies remember
--   only_from     with force, an owner: revoke only its holds
--   successor     up to 128 bytes, no space, never queued: the attempt that has the hold from now
--                 on; attempt is refused. Default: the hold stays with its attempt
--   keep_ms       1 to 9999999999, not with force: if this ends the owner's only hold, it
--                 stays for so long, of "kept-" and the attempt, which clients must not send
--
--   read, write
--            token          granted: for a writer the first of its tokens; for a reader that of the
--                           last writer, or a larger one; 0: without a token. A second delivery
--                           grants nothing more; its lease begins anew
--            {pttl, time}   in use: poll again in pttl ms at most, and if queued within claim_ms;
--                           the clock in microseconds
--            -4             refused: the owner has max_depth holds on this side
--            -6             write: refused, since the owner reads and another reader waits to
--                           write: each would wait for the other. A place of before stays
--            -7             read: refused, max_readers read or wait
--            {-8, highest}  quorum, write: refused, this accepted token is not smaller than the
--                           proposal. A reader gets the larger token as its answer
--   renew    time           held for at least ttl_ms from now
--            0              lost: expired, released, or another owner's. With successor, a second
--                           delivery is answered as the first one
--   release  1 + n          released, or held for keep_ms; the owner has n holds left. Waiters that
--                           may enter are admitted; of an owner that waits to read and to write,
--                           one, and the other at its next poll. After a reader that has expired,
--                           a writer is admitted by its next poll
--            0              the attempt held nothing. A second delivery changes nothing
--            n              force: so many readers, or holds of the writer, were revoked
--   downgrade
--            time           it reads with the token that it had, for at least ttl_ms from now. If
--                           the owner has no other hold to write, all readers that wait are
--                           admitted
--            0              lost
--   inspect  {1, token, waiters, time, waiting_writers, readers}, then side, owner, count, pttl of
--                           each holder: the writer, side "write", then readers, side "read": of
--                           more than 500 a sample; then readers counts expired ones as well.
--                           token is a text
--            {-2, '0', 0, time}, {-3, '0', 0, time}
--   wait     {pttl, time, waiter...}  readers stay out: the others keep their places for claim_ms;
--                           these, counted from 1, have no place or may enter: send read for them
--   any      -1             read, write, renew with successor: refused, the attempt was ended or
--                           downgraded, or comes too late
--            -2             refused: the key holds something else; for renew and downgrade: lost
--            -3             refused: the key has no TTL; for renew, release and downgrade: -2, but
--                           a hold that is alone is released
--            -5             refused: a word is malformed
--            -9             quorum, read, write, and renew with successor: refused, the node was
--                           not admitted since it started
--            -10            not served, and no hold was changed: the call had too much to do, or
--                           with `all`, another lock was not granted. wait: send read for all
--
-- Admission: an owner that holds the lock may read and, if it writes or is the only reader,
-- write. Others read if no other owner writes or waits to write, and write if no other holds the
-- lock. The two sides take turns: a writer that waits keeps new readers out (writer_wait_until,
-- extended by its polls); when a writer leaves, the readers that queued before that are admitted
-- together, before the next writer (writer_left): see admit_waiters. The release of the last hold
-- admits them; if a holder has expired, their next poll, or any request that finds the lock free.

-- ------------------------------------------------------------------------------------------ checks
-- An empty word is the default. The words that all locks share are checked here, those of a lock
-- where it is served.

-- The text as a number, if it is one of 1 to `highest`.
local function up_to(highest, text)
  local number = string.find(text, '^[1-9]%d*$') and text + 0
  return number and number <= highest and number or nil
end

-- Whether scripts may publish there: a release does so with the rights of its own user, to whatever
-- channel was queued.
local function is_channel(text)
  return #text <= 256 and not string.find(text, ' ', 1, true)
    and (#text > 36 and string.find(text, '^wake:%x+$', -37)
      or #text > 37 and string.find(text, '^wake:%x+~$', -38))
end

local verb, attempts, node = ARGV[1], 0, #KEYS % 3 == 1 and KEYS[#KEYS] or nil
local n = (#KEYS - (node and 1 or 0)) / 3
if n < 1 or n > 128 or #KEYS % 3 == 2 then return -5 end

local ttl_ms, min_token, claim_ms, channel, max_depth, grant_before, token_ttl_ms, tokens
local all, purpose, run, remember, force, only_from, keep_ms, max_readers, minimum, clock
local is_acquire, successor, last_token
local first, further -- the first of the shared words; some that most calls have not
if verb == 'read' or verb == 'write' then
  is_acquire, first = true, 2 + 4 * n
  ttl_ms, min_token, further = ARGV[first], ARGV[first + 1], ARGV[first + 2]
  if further then
    claim_ms, channel, max_depth, grant_before, token_ttl_ms, tokens, all, purpose, run =
      unpack(ARGV, first + 2)
    if verb == 'read' then max_readers, tokens = tokens, nil end
  end
elseif verb == 'release' then
  first = 2 + 3 * n
  further = ARGV[first + 1]
  if not ARGV[first - 1] then return -5 end
  if further then
    remember, claim_ms, channel, max_depth, token_ttl_ms, tokens, force, only_from, keep_ms =
      unpack(ARGV, first + 1)
  end
elseif verb == 'renew' then
  ttl_ms, successor, run = unpack(ARGV, 2 + 2 * n)
  if successor == '' then successor = nil end
elseif verb == 'downgrade' then
  ttl_ms, min_token, token_ttl_ms, tokens, last_token = unpack(ARGV, 2 + 2 * n)
  further = token_ttl_ms
elseif verb == 'wait' then
  attempts, further = (#ARGV - 4) / 2, true
  if #KEYS ~= 3 or attempts < 1 or attempts > 1024 or attempts % 1 > 0 then return -5 end
  claim_ms, channel, max_depth = unpack(ARGV, 2 + 2 * attempts)
  if claim_ms == '' then return -5 end
elseif verb == 'inspect' then
  only_from, further = ARGV[2], ARGV[2]
else
  return -5
end
local has_ttl = is_acquire or verb == 'renew' or verb == 'downgrade'
if has_ttl and not up_to(9999999999, ttl_ms or '') then return -5 end
if min_token and min_token ~= '' then
  minimum = string.find(min_token, '^%d+$') and min_token + 0
  if not minimum or minimum >= 2^52 then return -5 end
end
local claim, count, depth, reader_limit = nil, 1, 255, 10000
if further then
  claim = up_to(60000, claim_ms or '')
  count = (tokens or '') == '' and 1 or up_to(1000, tokens)
  depth = (max_depth or '') == '' and 255 or up_to(1024, max_depth)
  reader_limit = (max_readers or '') == '' and 10000 or up_to(100000, max_readers)
  if grant_before == '' then grant_before = nil end
  if token_ttl_ms == '' then token_ttl_ms = nil end
  if force == '' then force = nil end
  if remember == '' then remember = nil end
  if only_from == '' then only_from = nil end
  if keep_ms == '' then keep_ms = nil end
  if not count or not depth or not reader_limit
    or claim_ms and claim_ms ~= '' and (not claim or all == '1')
    or channel and channel ~= '' and not is_channel(channel)
    or grant_before and not string.find(grant_before, '^%d+$')
    or token_ttl_ms and not up_to(9999999999, token_ttl_ms)
    or (remember or all) and not string.find((remember or '') .. ' ' .. (all or ''), '^1? 1?$')
    or purpose and purpose ~= '' and purpose ~= 'nested' and purpose ~= 'repair'
    or force and force ~= 'read' and force ~= 'write'
    or only_from and (#only_from > 256 or string.find(only_from, '^:'))
    or only_from and string.find(only_from, ' ', 1, true)
    or keep_ms and (force or not up_to(9999999999, keep_ms)) then
    return -5
  end
end
token_ttl_ms = token_ttl_ms or '3600000'

-- -------------------------------------------------------------------------------- the common cases
-- Nothing waits. A lock that takes more than this is left to the next sections.

-- Raises the counter, and returns the first of the new tokens, all larger than `least`. INCRBY is
-- enough until the counter is lost, or `least` has reached it. Returns nil and a refusal if the
-- counter is spoilt, or `least` a day ahead of the clock; then the counter stays as it was.
local function next_tokens(fence, least, count, token_ttl_ms)
  local last = redis.pcall('INCRBY', fence, count == 1 and '1' or count) -- a text takes less time
  if type(last) == 'table' then return nil, last end
  if last > count and last - count >= least and last < 2^53 then return last - count + 1 end
  local clock, refusal = redis.pcall('TIME'), -5
  if last >= 2^53 then
    refusal = {err = 'ERR the fencing counter is at 2^53'}
  elseif clock.err then
    refusal = clock
  elseif least <= (clock[1] + 86400) * 1000000 + clock[2] then
    local first = math.max(least + 1, clock[1] * 1000000 + clock[2])
    local text = string.format('%.0f', first + count - 1)
    refusal = redis.pcall('SET', fence, text, 'PX', token_ttl_ms)
    if not refusal.err then return first end
  end
  if last ~= count then
    redis.pcall('DECRBY', fence, count)
  elseif redis.pcall('DEL', fence) ~= 1 then -- it must not be left without a TTL
    redis.pcall('PEXPIRE', fence, token_ttl_ms)
  end
  return nil, refusal
end

local answers = {nil}
local try = redis.pcall
if is_acquire then
  local is_plain = not node and not grant_before and all ~= '1'
  local found = not is_plain and 2 or n == 1 and redis.call('EXISTS', KEYS[1], KEYS[2])
    or redis.call('EXISTS', unpack(KEYS, 1, 2 * n))
  local seen, are_long = n > 1 and is_plain and {}, false
  for i = 1, n do
    local attempt, owner, proposal = ARGV[1 + i], ARGV[1 + n + i], ARGV[1 + 3 * n + i]
    local lock, fence, keys = KEYS[i], KEYS[2 * n + i], found
    local token, state, pttl, accepted
    if seen then -- the same lock again must wait for its first answer
      if found > 0 then keys = redis.call('EXISTS', lock, KEYS[n + i]) end
      if seen[lock] then keys = 2 end
      seen[lock] = true
    end
    if owner == '' then
      owner = attempt
    elseif #owner > 256 or string.find(owner, '^:') or string.find(owner, ' ', 1, true) then
      keys = 2
    end
    if keys == 2 or ARGV[1 + 2 * n + i] ~= '' or attempt == '' or #attempt > 128
      or string.find(attempt, ' ', 1, true) then
      keys = 2
    elseif keys == 1 and verb == 'read' and not are_long then
      -- One reader more, and no attempt writes or waits.
      state = try('HMGET', lock, 'mode', 'readers', 'token', 'write', 'read:' .. owner,
        'writer_wait_until')
      local readers = state[1] == 'several' and tonumber(state[2]) or 0
      are_long = #(state[4] or state[5] or '') > 1000 -- an owner has many holds: see call.work
      if readers > 0 and readers < reader_limit and not (state[4] or state[5] or state[6]) then
        pttl, clock = tonumber(try('PTTL', lock)) or -1, clock or try('TIME')
        if pttl >= 0 and clock[1] then keys = 0 end
      end
    end
    if keys > 0 then
      token = nil
    elseif proposal ~= '' then
      -- Quorum: granted if it is larger than all that this node has accepted. If the grant fails,
      -- the node forgets it: the same proposal must not be too small then.
      clock = clock or try('TIME')
      local known = try('GET', fence) or '0'
      if not clock.err and type(known) == 'string' and string.find(known, '^%d+$')
        and up_to((clock[1] + 86400) * 1000000, proposal) and proposal + 0 > known + 0 then
        local last = count == 1 and proposal or string.format('%.0f', proposal + count - 1)
        local set = try('SET', fence, last, 'PX', token_ttl_ms)
        if not set.err then token, accepted = proposal + 0, known end
      end
    elseif not minimum then
      token = 0
    else -- a reader has the token of the last writer, if it is large enough
      local last = verb == 'read' and (state and state[3] or try('GET', fence))
      token = type(last) == 'string' and string.find(last, '^%d+$') and last + 0
      if not token or token < minimum or token >= 2^53 then
        token = next_tokens(fence, minimum, count, token_ttl_ms)
      end
    end
    local stored
    if token and state then
      local ends, field = clock[1] * 1000 + math.floor(clock[2] / 1000) + ttl_ms, 'read:' .. owner
      stored = try('HSET', lock, field, ends .. ' ' .. attempt, 'readers', state[2] + 1)
      if stored == 1 and pttl < ttl_ms + 0 then
        stored = try('PEXPIRE', lock, ttl_ms)
        if stored ~= 1 then
          redis.call('HDEL', lock, field)
          redis.call('HSET', lock, 'readers', state[2])
        end
      end
      if stored == 1 and token > 0 and token ~= tonumber(state[3]) then
        redis.call('HSET', lock, 'token', string.format('%.0f', token))
      end
    elseif token then
      local mode = 'sole ' .. verb .. ' ' .. owner .. ' ' .. attempt
      stored = verb == 'write' and token > 0
        and try('HSET', lock, 'mode', mode, 'token', string.format('%.0f', token))
        or try('HSET', lock, 'mode', mode)
      if stored == 1 or stored == 2 then
        stored = try('PEXPIRE', lock, ttl_ms)
        if stored ~= 1 then redis.call('DEL', lock) end -- it must not be left without a TTL
      end
    end
    if stored == 1 then
      answers[i] = token
    elseif accepted then
      redis.call('SET', fence, accepted, 'PX', token_ttl_ms)
    end
  end
elseif verb == 'release'
  and (not further or not (remember or claim or force or keep_ms) and count == 1) then
  local are_long = false -- the fields of an owner with many holds: see call.work
  for i = 1, n do
    local attempt, owner, lock = ARGV[1 + i], ARGV[1 + n + i], KEYS[i]
    if owner == '' then owner = attempt end
    local hold, number, mode = owner .. ' ' .. attempt, ARGV[1 + 2 * n + i], nil
    -- Not a list of attempts: only of one may the hold be released here.
    if not string.find(attempt, ' ', 1, true) and (number == '' or up_to(2^53 - 1, number)) then
      mode = try('HGET', lock, 'mode')
    end
    -- The only hold: an attempt that waits would have turned it into one of several.
    if mode == 'sole read ' .. hold or mode == 'sole write ' .. hold then
      if try('DEL', lock) == 1 then answers[i] = 1 end
    elseif mode == 'several' and not are_long then -- the only hold of its owner, and none waits
      local state = try('HMGET', lock, 'read:' .. owner, 'readers', 'write')
      local readers, text = tonumber(state[2]) or 0, state[3] or state[1] or ''
      are_long = #text > 1000
      local ends, words = string.match(are_long and '' or text, '^(%d+) (.+)$')
      local is_held = not state[3] and words == attempt and readers > 0
        or state[3] and words == hold and readers == 0 and not state[1]
      if is_held and try('EXISTS', KEYS[n + i]) == 0 then
        clock = clock or try('TIME')
        local is_valid = clock[1] and ends + 0 > clock[1] * 1000 + math.floor(clock[2] / 1000)
        if is_valid and readers > 1 and try('HDEL', lock, 'read:' .. owner) == 1 then
          try('HSET', lock, 'readers', readers - 1) -- if refused, other_reader counts anew
          answers[i] = 1
        elseif is_valid and readers < 2 and (tonumber(try('PTTL', lock)) or 0) > 0 then
          if try('DEL', lock) == 1 then answers[i] = 1 end
        end
      end
    end
  end
elseif verb == 'renew' and not successor then
  clock = redis.call('TIME')
  local time = clock[1] * 1000000 + clock[2]
  for i = 1, n do
    local attempt, owner, lock = ARGV[1 + i], ARGV[1 + n + i], KEYS[i]
    if owner == '' then owner = attempt end
    local mode, hold = try('HGET', lock, 'mode'), owner .. ' ' .. attempt
    local is_only_hold = mode == 'sole read ' .. hold or mode == 'sole write ' .. hold
    local pttl = is_only_hold and tonumber(try('PTTL', lock)) or -1
    if pttl >= 0 and (pttl >= ttl_ms + 0 or try('PEXPIRE', lock, ttl_ms) == 1) then
      answers[i] = time
    end
  end
end
if n == 1 and answers[1] then return answers end
local left = {} -- the locks without an answer
for i = 1, math.max(n, attempts) do
  if not answers[i] then left[#left + 1] = i end
end
if not left[1] then return answers end

-- -------------------------------------------------------------------------- one lock after another
-- From here on, one lock is served after the other. A function uses only what it receives, and
-- other functions. `lock` is a table: keys, words and fields of one lock; `call` has what all locks
-- of the call share.

-- An answer, or an error as a text, from its code on, which Redis 6.2 puts into another text.
local function to_answer(ok, answer)
  if ok and not (type(answer) == 'table' and answer.err) then return answer end
  answer = type(answer) == 'table' and answer.err or tostring(answer)
  -- The queue has lost its last entry in this call, and cannot be created anew: see unless_emptied.
  if string.find(answer, 'non local key', 1, true) then return 'TRYAGAIN its slot moves' end
  return string.match(answer, '%u%u%u+ [^\r\n]*') or 'ERR ' .. answer
end

clock = clock or redis.pcall('TIME')
if clock.err then
  for _, i in ipairs(left) do answers[i] = to_answer(false, clock) end
  return n == 1 and {err = answers[1]} or answers
end
local time = clock[1] * 1000000 + clock[2]
if verb == 'release' then minimum = tonumber(string.match(ARGV[first] or '', '^%d+$')) end
-- This mistake of a client must neither spoil a counter nor keep a lock from being released.
local is_far_ahead = (minimum or 0) > time + 86400000000
local call = {
  verb = verb, time = time, now = math.floor(time / 1000), -- microseconds, milliseconds
  ttl_ms = ttl_ms, has_token = minimum ~= nil, minimum = not is_far_ahead and minimum or 0,
  count = count, purpose = purpose, token_ttl_ms = token_ttl_ms, claim = claim,
  depth = depth, reader_limit = reader_limit, only_from = only_from, force = force,
  remembers = remember == '1' or force ~= nil or successor ~= nil, all = all == '1',
  keep_ms = keep_ms, successor = successor,
  is_trial = all == '1', -- nothing may be changed until each lock is found to be granted
  terms = claim and claim_ms .. ' ' .. (channel or '') .. ' ', -- in the entries of the queue
  answers = answers, work = 0, -- about how many commands were sent
}
if node and (is_acquire or successor or verb == 'downgrade') then
  local known = redis.call('HMGET', node, 'run', 'min_token', 'high', 'ttl')
  local numbers = (known[2] or '0') .. ' ' .. (known[3] or '0') .. ' ' .. (known[4] or '0')
  if verb ~= 'downgrade' and (not string.find(numbers, '^%d+ %d+ %d+$')
    or math.max(known[2] or 0, known[3] or 0, known[4] or 0) >= 2^53) then
    return {err = 'ERR the admission of the node is spoilt'}
  end
  call.node, call.admission = node, known
end

-- A reply that is not an error; nil if the key holds another type. Any other error, as a missing
-- right, ends the service of the lock.
local function unless_wrong_type(reply)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
end

-- The same for the queue. If the call has removed its last entry while the slot of the key moves, a
-- cluster refuses to read it ("a non local key"): then nothing waits.
local function unless_emptied(reply)
  local is_gone = type(reply) == 'table' and string.find(reply.err or '', 'non local key', 1, true)
  return not is_gone and unless_wrong_type(reply) or nil
end

-- Reads the fields of the lock. Returns a refusal if the key holds something else.
local function read_state(lock, call)
  local found = redis.pcall('HMGET', lock.key, 'mode', 'write', 'readers', 'read:' .. lock.owner,
    'token', 'writer_wait_until', 'upgrade', 'writer_left')
  if not unless_wrong_type(found) then return -2 end
  lock.mode, lock.write, lock.read, lock.token = found[1], found[2], found[4], found[5]
  call.work = call.work + #((lock.write or '') .. (lock.read or '')) / 64 -- an owner's many holds
  lock.readers, lock.wait_until = tonumber(found[3]) or 0, tonumber(found[6]) or 0
  lock.upgrade, lock.writer_left = found[7], tonumber(found[8])
  lock.pttl = redis.call('PTTL', lock.key)
  if lock.pttl == -1 then return -3 end
  local is_ours = lock.mode == 'several' or string.find(lock.mode or '', '^sole ')
  if lock.pttl ~= -2 and not is_ours then return -2 end
end

-- A hold, `end word...`: the millisecond at which it ends, and the words; nothing once it has
-- expired.
local function unexpired(hold, now)
  if not hold then return end
  local ends, rest = string.match(hold, '^(%d+) (.+)$')
  if ends and ends + 0 > now then return ends + 0, rest end
end

local function has(attempts, attempt)
  return string.find(' ' .. attempts .. ' ', ' ' .. attempt .. ' ', 1, true) ~= nil
end

local function count_attempts(attempts)
  return select(2, string.gsub(attempts or '', '[^ ]+', ''))
end

-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end

-- A lock without holds has no key.
local function delete_if_free(lock)
  local rest = redis.call('HMGET', lock.key, 'mode', 'write', 'readers')
  if rest[1] == 'several' and not rest[2] and (tonumber(rest[3]) or 0) <= 0 then
    redis.call('DEL', lock.key)
  end
end

-- The parts of a waiter's entry; nothing if it was written by hand: a claim of 20 digits, or one
-- that begins with 0, would make the grant fail half-way.
local function parse(entry)
  local attempt, kind, claim_ms, channel, owner, depth, tokens =
    string.match(entry, '^([^ ]+) (%l+) ([1-9]%d*) ([^ ]*) ([^ ]*) ?(%d*) ?(%d*)$')
  if not attempt or claim_ms + 0 > 60000 or tokens ~= '' and (tokens + 0 < 1 or tokens + 0 > 1000)
    or channel ~= '' and not is_channel(channel) then
    return nil
  end
  if owner == '' then owner = attempt end
  return attempt, kind, claim_ms, channel, owner, tonumber(depth) or 255, tonumber(tokens) or 1
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark. It also counts as alive if the clock was set back a little.
local function is_alive(queue, attempt, place, claim_ms, time)
  if place < 0 then place = place + 2^52 end -- a reader of a read-write lock on the same key
  return math.abs(time - place) < claim_ms * 1000
    or (tonumber(redis.call('ZSCORE', queue, 'seen ' .. attempt)) or 0) > 2^52 + 61000000 + time
end

-- Removes marks that have expired, and of `size` random entries the dead waiters. If a quarter
-- of them was dead, it looks at more. Of the marks that releases leave, 19,000 are kept.
local function clean(queue, size, call)
  local last_mark = 2^52 + call.time - call.time % 1000000 + 61000000
  local are_many = redis.call('ZCOUNT', queue, 2^52, last_mark) > 20000
  local marks = redis.call('ZRANGEBYSCORE', queue, 2^52, are_many and last_mark or 2^52 + call.time,
    'LIMIT', 0, 800)
  if marks[1] then redis.call('ZREM', queue, unpack(marks)) end
  call.work = call.work + 4 + #marks / 4
  for _ = 1, 4 do
    local some, dead = redis.call('ZRANDMEMBER', queue, size, 'WITHSCORES'), {}
    for at = 1, #some, 2 do
      local entry, place = some[at], tonumber(some[at + 1])
      local waiter, _, claim_ms = parse(entry)
      if place < 2^52 and not (waiter and is_alive(queue, waiter, place, claim_ms, call.time)) then
        dead[#dead + 1] = entry
      end
    end
    if dead[1] then redis.call('ZREM', queue, unpack(dead)) end
    call.work = call.work + 1 + #some + #dead
    if #dead * 4 < size then return end
    size = 128
  end
end

-- Serves some locks, and returns those for which the operation has no answer yet.
local function serve(operation, locks, call)
  local rest = {}
  for _, lock in ipairs(locks) do
    local ok, answer = true, -10
    if lock.index == 1 or call.work <= 2000 or call.all then -- about 3 ms
      ok, answer = pcall(operation, lock, call)
      call.work = call.work + 6
    end
    if not ok and lock.has_mark then redis.pcall('ZREM', lock.queue, 'ended ' .. lock.attempt) end
    local is_granted, admission = ok and type(answer) == 'number' and answer >= 0, call.admission
    -- The key was created for a grant that did not follow.
    if lock.is_new and not is_granted then pcall(delete_if_free, lock) end
    if lock.accepted and not is_granted then -- the node has not accepted the proposal either
      redis.pcall('SET', lock.fence, lock.accepted, 'PX', call.token_ttl_ms)
    end
    -- An admission of this node waits for the longest lease.
    if is_granted and admission and (answer > 0 or call.verb == 'read' or call.verb == 'write')
      and call.ttl_ms + 0 > (tonumber(admission[4] or 0) or 2^53) then
      admission[4] = call.ttl_ms
      redis.call('HSET', call.node, 'ttl', call.ttl_ms)
    end
    if ok and answer == nil then
      rest[#rest + 1] = lock
    else
      call.answers[lock.index] = to_answer(ok, answer)
    end
  end
  return rest
end

-- The words of one lock are checked here for all that the common cases do not answer. For wait,
-- each of its attempts has a table. What functions add to it:
--   read_state        mode, write, readers, read, token, wait_until, upgrade, writer_left, pttl
--   wait_for_writer   entry, scores: the attempt's, in the queue
--   admit_waiters     no_token: why a waiter that may enter has none; is_unfinished: there are too
--                     many waiters to check, so that nothing may overtake them
--   a grant           is_new: the key was created for it; is_alone: by the only hold; accepted: the
--                     token that the node had accepted before
--   record_end        has_mark
--   the trial (all)   was_held, was_inside: before the first change
local locks, again, seen, a_day_ahead = {}, {}, {}, time + 86400000000
local is_late = grant_before and time >= tonumber(grant_before)
for _, i in ipairs(left) do
  local attempt, owner, number, proposal = '', '', '', ''
  if verb ~= 'inspect' then
    attempt, owner = ARGV[1 + i] or '', ARGV[1 + math.max(n, attempts) + i] or ''
  end
  if is_acquire or verb == 'release' then number = ARGV[1 + 2 * n + i] end
  if verb == 'downgrade' then number = last_token or '' end
  if is_acquire then proposal = ARGV[1 + 3 * n + i] end
  local is_again = is_acquire and seen[KEYS[i]]
  if is_again and all == '1' or #attempt > 128 or string.find(attempt, ' ', 1, true)
    or attempt == '' and verb ~= 'inspect'
    or #owner > 256 or string.find(owner, '^:') or string.find(owner, ' ', 1, true)
    or number ~= '' and not up_to(2^(is_acquire and 52 or 53) - 1, number)
      and (is_acquire or number ~= '0')
    or proposal ~= '' and not up_to(a_day_ahead, proposal) then
    answers[i] = -5
  elseif is_late or (is_acquire or successor) and node and call.admission[1] ~= run then
    answers[i] = is_late and -1 or -9
  elseif is_acquire and proposal == '' and is_far_ahead then
    answers[i] = -5 -- also if it is in use: a release would grant it with a smaller token
  else
    if owner == '' then owner = attempt end
    if force or verb == 'inspect' then owner = only_from or '' end
    local lock, list = {
      index = i, key = KEYS[i], queue = KEYS[n + i], fence = KEYS[2 * n + i],
      attempt = attempt, owner = owner, number = number ~= '' and number or nil,
      proposal = tonumber(proposal),
      checks_left = 128, batches = 0, -- of waiters, in search of a writer; of readers
    }, is_again and again or locks
    list[#list + 1] = lock
  end
  seen[KEYS[i] or ''] = true
end

-- The text by which the attempt is queued.
local function entry_of(lock, kind, call)
  return lock.attempt .. ' ' .. kind .. ' ' .. call.terms
    .. (lock.owner ~= lock.attempt and lock.owner or '') .. ' ' .. call.depth
    .. (kind == 'write' and call.count > 1 and ' ' .. call.count or '')
end

local function renew(lock, call)
  if read_state(lock, call) then return -2 end
  local sole = string.match(lock.mode or '', '^sole [^ ]+ (.+)$')
  local ttl, until_then = call.ttl_ms + 0, call.now + call.ttl_ms
  if sole then
    if sole ~= lock.owner .. ' ' .. lock.attempt then return 0 end
    if lock.pttl < ttl or call.successor then -- see adopt
      redis.call('PEXPIRE', lock.key, math.max(lock.pttl, ttl))
    end
    return call.time
  end
  local field, ends, words = 'read:' .. lock.owner, unexpired(lock.read, call.now)
  if not words or not has(words, lock.attempt) then
    field, ends, words = 'write', unexpired(lock.write, call.now)
    local writer, attempts = string.match(words or '', '^([^ ]+) (.+)$')
    if writer ~= lock.owner or not has(attempts, lock.attempt) then return 0 end
  end
  if ends < until_then or call.successor then
    redis.call('HDEL', lock.key, 'read:') -- a full server refuses HSET as the first write
    if lock.pttl < ttl then redis.call('PEXPIRE', lock.key, call.ttl_ms) end
    redis.call('HSET', lock.key, field, math.max(ends, until_then) .. ' ' .. words)
  end
  return call.time
end

-- --------------------------------------------------------------------------------------- the queue

-- Queues the attempt at its place; or if it is queued, notes that it was seen, which counts for one
-- claim. A place of 0 is before all other writers, also if it was queued already. `lock.scores` are
-- those of its mark of an end, its entry, and its mark of having been seen.
local function enqueue(lock, place, call)
  local is_queued, score = lock.scores and lock.scores[2], place or call.time
  if call.verb == 'read' then score = score - 2^52 end
  local is_added = (not is_queued or place == 0)
    and redis.call('ZADD', lock.queue, place == 0 and 'CH' or 'NX', score, lock.entry) == 1
  local is_new = is_added and not is_queued
  if not is_added or place then
    -- The score is above all marks of ends, so that the oldest of those are found first.
    local seen_until = 2^52 + 61000000 + call.time + call.claim * 1000
    redis.call('ZADD', lock.queue, string.format('%.0f', seen_until), 'seen ' .. lock.attempt)
    -- The queue is kept for a minute: for usual claims, one poll in ten seconds suffices for that.
    local last = is_queued and call.claim <= 30000 and tonumber(lock.scores[3])
    if last and math.floor(last / 10^7) == math.floor(seen_until / 10^7) then return is_new end
  end
  local kept = redis.pcall('PEXPIRE', lock.queue, '60000')
  if type(kept) == 'table' then
    if is_new then redis.call('ZREM', lock.queue, lock.entry, 'seen ' .. lock.attempt) end
    error(kept)
  end
  return is_new
end

-- A hold that is alone is the field `mode`, and ends with the key. When another one comes, it gets
-- a field and an end of its own. A full server refuses HSET as the first write of a script: to end
-- a hold, HDEL comes first.
local function expand_sole_hold(lock, call)
  local side, owner, attempt = string.match(lock.mode or '', '^sole ([^ ]+) ([^ ]+) ([^ ]+)$')
  if not side then return end
  local hold, fields = call.now + math.max(lock.pttl, 1) .. ' '
  if side == 'read' then
    lock.readers = 1
    if owner == lock.owner then lock.read = hold .. attempt end
    fields = {'read:' .. owner, hold .. attempt, 'readers', 1}
    lock.token = unless_wrong_type(redis.pcall('GET', lock.fence)) or lock.token
    if lock.token then fields[5], fields[6] = 'token', lock.token end
  else
    lock.write = hold .. owner .. ' ' .. attempt
    fields = {'write', lock.write}
  end
  if call.is_trial then return end
  if call.verb ~= 'read' and call.verb ~= 'write' then redis.call('HDEL', lock.key, 'read:') end
  lock.mode = 'several'
  redis.call('HSET', lock.key, 'mode', 'several', unpack(fields))
end

-- Removes these fields.
local function remove_fields(lock, fields)
  for i = 1, #fields, 1000 do
    redis.call('HDEL', lock.key, unpack(fields, i, math.min(i + 999, #fields)))
  end
end

-- Returns the latest end of another owner's hold to read; the next millisecond if readers remain
-- unchecked; nil if there is none. Many readers are checked by a random sample, but with `all` each
-- of them; expired ones are removed.
local function other_reader(lock, call)
  local size, own = redis.call('HLEN', lock.key), 'read:' .. lock.owner
  local is_sampled = size > 512 and not call.all
  local sample = redis.call('HRANDFIELD', lock.key, is_sampled and 32 or size, 'WITHVALUES')
  call.work = call.work + #sample / 2
  local expired, latest, readers = {}, nil, 0
  for i = 1, #sample, 2 do
    call.work = call.work + #sample[i + 1] / 64
    if string.sub(sample[i], 1, 5) == 'read:' then
      local ends = unexpired(sample[i + 1], call.now)
      if not ends then
        expired[#expired + 1] = sample[i]
      else
        readers = readers + 1
        if sample[i] ~= own then latest = math.max(latest or 0, ends) end
      end
    end
  end
  if call.is_trial then
    if lock.mode == 'several' then lock.readers = readers end
    return latest
  end
  remove_fields(lock, expired)
  if is_sampled then
    if expired[1] then redis.call('HINCRBY', lock.key, 'readers', -#expired) end
  elseif readers ~= lock.readers then
    redis.call('HDEL', lock.key, 'readers') -- see end_write
    if readers > 0 then redis.call('HSET', lock.key, 'readers', readers) end
  end
  read_state(lock, call)
  return latest or is_sampled and call.now + 1 or nil
end

-- Whether too many read; with is_queue, also whether too many read or wait. Dead readers and dead
-- waiters do not count: they are removed where there seem to be too many.
local function is_full(lock, is_queue, call)
  for round = 1, is_queue and 2 or 1 do
    local queued = is_queue and redis.call('ZCOUNT', lock.queue, '-inf', '(4503599627370496') or 0
    if lock.readers + queued < call.reader_limit then return false end
    other_reader(lock, call)
    if lock.readers + queued < call.reader_limit then return false end
    if is_queue and round == 1 then clean(lock.queue, 128, call) end
  end
  return true
end

-- Queues a reader of a lock that is in use for busy_ms.
local function queue_to_read(lock, busy_ms, call)
  if call.claim then
    local is_queued = redis.call('ZSCORE', lock.queue, lock.entry)
    if not is_queued and is_full(lock, true, call) then return -7 end
    enqueue(lock, lock.number, call)
  end
  return {busy_ms, call.time}
end

-- Queues a writer of a lock that is in use for busy_ms. While it waits, new readers stay out. An
-- owner that reads goes before all other writers, since they wait for it.
local function queue_to_write(lock, busy_ms, call)
  if call.claim then
    local ends, place, upgrade = call.now + call.claim, lock.number, {}
    if not unexpired(lock.write, call.now) and unexpired(lock.read, call.now) then
      place = 0
      local upgrade_ends, upgrader = unexpired(lock.upgrade, call.now)
      if upgrader and upgrader ~= lock.owner then
        if unexpired(redis.call('HGET', lock.key, 'read:' .. upgrader), call.now) then return -6 end
        upgrade_ends = nil
      end
      upgrade = {'upgrade', math.max(ends, upgrade_ends or 0) .. ' ' .. lock.owner}
    end
    local is_new = enqueue(lock, place, call)
    local stored = redis.pcall('HSET', lock.key, 'writer_wait_until',
      math.max(ends, lock.wait_until), unpack(upgrade))
    if type(stored) == 'table' then
      if is_new then redis.call('ZREM', lock.queue, lock.entry, 'seen ' .. lock.attempt) end
      error(stored)
    end
  end
  return {busy_ms, call.time}
end

-- The beginning of each read and write: reads the lock, and answers an attempt that was ended, or
-- that must wait since another owner writes.
local function wait_for_writer(lock, call)
  local problem = read_state(lock, call)
  if problem then return problem end
  lock.entry = call.claim and entry_of(lock, call.verb, call) or ''
  lock.scores = redis.call('ZMSCORE', lock.queue, 'ended ' .. lock.attempt, lock.entry,
    'seen ' .. lock.attempt)
  if (tonumber(lock.scores[1]) or 0) > 2^52 + call.time then return -1 end
  if call.is_trial then -- the only hold has no field, in which others would be found
    local side, owner = string.match(lock.mode or '', '^sole ([^ ]+) ([^ ]+)')
    if side and owner ~= lock.owner and (side == 'write' or call.verb == 'write') then
      return {lock.pttl, call.time}
    end
  end
  expand_sole_hold(lock, call)
  local _, reads = unexpired(lock.read, call.now)
  if reads and call.verb == 'read' then return nil end
  -- A late delivery of what was downgraded since: it reads, and must not begin to write again.
  if reads and has(reads, lock.attempt) then return -1 end
  local write_ends, write = unexpired(lock.write, call.now)
  if not write or string.match(write, '^[^ ]+') == lock.owner then return nil end
  local queue = call.verb == 'read' and queue_to_read or queue_to_write
  return queue(lock, write_ends - call.now, call)
end

if is_acquire or verb == 'renew' and not successor then
  locks = serve(is_acquire and wait_for_writer or renew, locks, call)
end
if verb == 'wait' then
  if #locks < attempts then return -5 end
  call.waiters, locks = locks, {locks[1]}
end
-- One request in sixteen cleans the queue of a lock, at the end.
local cleans = (claim or call.remembers) and (-time) % 16 < n
if not (locks[1] or again[1] or cleans) then
  if n == 1 and type(answers[1]) == 'string' then return {err = answers[1]} end
  return answers
end

-- ---------------------------------------------------------------------------- admission of waiters

-- The writer that has waited longest and is alive. Dead ones before it leave the queue, other kinds
-- keep their places. Of a long queue, one call checks 128 waiters: then lock.is_unfinished, and the
-- lock is busy, so that nothing overtakes those behind.
local function first_writer(lock, call)
  local others = 0
  while lock.checks_left > 0 do
    lock.checks_left, call.work = lock.checks_left - 1, call.work + 2
    local first = unless_emptied(redis.pcall('ZRANGEBYSCORE', lock.queue, 0, '(4503599627370496',
      'WITHSCORES', 'LIMIT', others, 1))
    local entry, place = first and first[1], first and tonumber(first[2])
    if not entry then return nil end
    local attempt, kind, claim_ms, channel, owner, _, tokens = parse(entry)
    if not attempt or not is_alive(lock.queue, attempt, place, claim_ms, call.time) then
      if call.is_trial then
        others = others + 1
      else
        redis.call('ZREM', lock.queue, entry, 'seen ' .. (attempt or ''))
      end
    elseif kind == 'write' then
      return {entry = entry, place = place, attempt = attempt, claim_ms = claim_ms,
        channel = channel, owner = owner, tokens = tokens}
    else
      others = others + 1
    end
  end
  lock.is_unfinished = true
end

-- False also if there are too many waiters to check: new readers must then stay out.
local function no_writer_waits(lock, call)
  return not first_writer(lock, call) and not lock.is_unfinished
end

-- After a grant. If this is refused, new readers stay out a claim longer: the grant has no error.
local function end_waiting(lock, call)
  if no_writer_waits(lock, call) then
    redis.call('HDEL', lock.key, 'writer_wait_until', 'upgrade')
  end
end

-- The attempt is removed only if it is queued: a server that refuses writes then reports that
-- only if there is something to write.
local function leave_queue(lock, kind, call)
  local entry = call.claim and entry_of(lock, kind, call)
  local place = entry and unless_emptied(redis.pcall('ZSCORE', lock.queue, entry))
  if not place then return false end
  redis.call('ZREM', lock.queue, entry, 'seen ' .. lock.attempt)
  return true
end

-- Before a hold is written: makes the key last until its end. This comes before all other writes
-- of a grant, since it may be refused: a lock must not stay without a TTL, nor a waiter be notified
-- of a hold that is not written. Not PEXPIREAT: if the server is stopped for longer than a lease in
-- the middle of this script, that deletes the key, and the hold is written to one without a TTL. On
-- Redis 6.2 the key must last until the script has ended, at least 10 ms; the hold has its own end.
local function reserve(lock, ends, call)
  redis.call('HSET', lock.key, 'mode', 'several')
  lock.is_new = lock.is_new or lock.pttl == -2
  if lock.pttl < ends - call.now then
    local kept = redis.pcall('PEXPIRE', lock.key, math.max(ends - call.now, 10))
    if type(kept) == 'table' then
      if lock.pttl == -2 then redis.call('DEL', lock.key) end
      error(kept)
    end
    lock.pttl = ends - call.now
  end
end

-- After a grant that failed, since the waiter was dead: the key lasts as long as it has to.
local function shorten(lock, pttl)
  pttl = math.max(pttl, 1)
  -- Counted from now, so never earlier than the end of a hold.
  if pttl < lock.pttl then redis.call('PEXPIRE', lock.key, pttl) end
  lock.pttl = pttl
end

-- The lock has no writer any more. Readers that queued before this go before the next writer, but
-- not those that ask right now. Their token is that of the fence: the writer may have used a block,
-- of which the field `token` is the first. HDEL comes first, since a full server refuses HSET as
-- the first write.
local function end_write(lock, call)
  redis.call('HDEL', lock.key, 'upgrade')
  redis.call('HSET', lock.key, 'writer_left', string.format('%.0f', call.time - 1))
  redis.call('HDEL', lock.key, 'write', 'token')
  lock.token = nil
end

-- Readers get the token of the last writer, unless it is below min_token: others may have had
-- larger ones then.
local function shared_token(lock, call)
  local last = lock.token or redis.pcall('GET', lock.fence)
  if type(last) == 'table' then return nil, last end
  local token = to_token(last)
  if token and token >= call.minimum then return token end
  return next_tokens(lock.fence, call.minimum, 1, call.token_ttl_ms)
end

-- Publishes `attempt,attempt token time lock`. False: the channel has no subscriber, so the waiter
-- is dead. With "~", it may listen to another node of a cluster, which PUBLISH does not count. An
-- error: this user may not publish there.
--
-- Replicas do not publish it: their subscribers are not counted, and must not be notified of a lock
-- that may be granted to the next waiter.
local function notify(lock, channel, attempts, token, at)
  if channel == '' or attempts == lock.attempt then return true end
  redis.set_repl(redis.REPL_NONE)
  local receivers = redis.pcall('PUBLISH', channel,
    attempts .. string.format(' %.0f %.0f ', token, at) .. lock.key)
  redis.set_repl(redis.REPL_ALL)
  return receivers ~= 0 or string.byte(channel, -1) == 126
end

-- The readers of a batch that may enter, by channel: no dead ones, and none if their owner has
-- max_depth holds.
local function select_readers(lock, entries, call)
  local channels, holds, longest = {}, {}, 0
  for i = 1, #entries, 2 do
    local attempt, kind, claim_ms, channel, owner, depth = parse(entries[i])
    local place = tonumber(entries[i + 1])
    if kind == 'read' and is_alive(lock.queue, attempt, place, claim_ms, call.time) then
      local hold = holds[owner]
      if not hold then
        local field = redis.call('HGET', lock.key, 'read:' .. owner)
        local ends, attempts = unexpired(field, call.now)
        call.work = call.work + #(field or '') / 64
        hold = {ends = ends or 0, attempts = attempts, is_new = not field}
        hold.count = count_attempts(attempts)
        holds[owner] = hold
      end
      if hold.count < depth then
        hold.count = hold.count + 1
        longest = math.max(longest, claim_ms)
        if attempt == lock.attempt then channel = '' end
        channels[channel] = channels[channel] or {}
        local waiter = {attempt = attempt, owner = owner, hold = hold, ends = call.now + claim_ms}
        table.insert(channels[channel], waiter)
      end
    end
  end
  return channels, call.now + longest
end

-- Notifies the first of those that are left of a long queue: it polls, and admits the next batch.
local function notify_rest(lock, latest)
  local entries = redis.pcall('ZRANGEBYSCORE', lock.queue, '-inf', latest, 'LIMIT', 0, 64)
  for _, entry in ipairs(unless_emptied(entries) or {}) do
    local attempt, _, _, channel = parse(entry)
    if attempt and channel ~= '' and notify(lock, channel, attempt, 0, 0) then return end
  end
end

-- Grants the lock to the readers of one batch, and publishes one message for each client. Returns
-- whether one of them was alive.
local function admit_batch(lock, entries, channels, token, call)
  local removed, admitted, last = {}, {}, 0 -- admitted: owner to hold
  for i = 1, #entries, 2 do
    removed[i], removed[i + 1] = entries[i], 'seen ' .. string.match(entries[i], '^[^ ]*')
  end
  redis.call('ZREM', lock.queue, unpack(removed))
  for channel, waiting in pairs(channels) do
    local names = {}
    for i, waiter in ipairs(waiting) do names[i] = waiter.attempt end
    if notify(lock, channel, table.concat(names, ','), token, call.time) then
      for _, waiter in ipairs(waiting) do
        local hold = waiter.hold
        hold.ends = math.max(hold.ends, waiter.ends)
        hold.attempts = (hold.attempts and hold.attempts .. ' ' or '') .. waiter.attempt
        admitted[waiter.owner], last = hold, math.max(last, hold.ends)
      end
    end
  end
  for owner, hold in pairs(admitted) do
    if hold.is_new then lock.readers = lock.readers + 1 end
    redis.call('HSET', lock.key, 'read:' .. owner, hold.ends .. ' ' .. hold.attempts)
  end
  if last == 0 then return false, 0 end
  redis.call('HSET', lock.key, 'readers', lock.readers, 'token', string.format('%.0f', token))
  return true, last
end

-- Grants the lock to the readers at the front of the queue, up to the score `latest`. False once
-- the queue is empty, or too many were dead.
local function admit_readers(lock, latest, call)
  local size, is_admitted = lock.readers > 512 and 16 or 128, false
  while not is_admitted do
    local entries = unless_emptied(redis.pcall('ZRANGEBYSCORE', lock.queue, '-inf', latest,
      'WITHSCORES', 'LIMIT', 0, size))
    if not entries or not entries[1] then return false end
    lock.batches = lock.batches + 1
    lock.is_unfinished = lock.is_unfinished or lock.batches > 2
    if lock.batches > 2 then return false end
    call.work = call.work + 10 + 2 * #entries
    local channels, longest = select_readers(lock, entries, call)
    local pttl, token = lock.pttl, nil
    if next(channels) then
      token, lock.no_token = shared_token(lock, call)
      if not token then return false end
      reserve(lock, longest, call)
    end
    local last
    is_admitted, last = admit_batch(lock, entries, channels, token, call)
    if token then shorten(lock, math.max(pttl, last - call.now)) end
    if is_admitted and #entries == 2 * size then notify_rest(lock, latest) end
  end
  return true
end

-- Grants the lock to the writer that has waited longest; with `reader`, only to this owner.
local function admit_writer(lock, reader, call)
  for _ = 1, reader and 1 or 32 do
    local writer = first_writer(lock, call)
    if not writer then
      if lock.is_unfinished then return false end
      redis.call('HDEL', lock.key, 'writer_wait_until', 'upgrade')
      return false
    end
    if reader and writer.owner ~= reader then return false end
    local token
    token, lock.no_token = next_tokens(lock.fence, call.minimum, writer.tokens, call.token_ttl_ms)
    if not token then return false end
    call.work = call.work + 10
    local pttl, ends = lock.pttl, call.now + writer.claim_ms
    reserve(lock, ends, call)
    redis.call('HDEL', lock.key, 'upgrade')
    redis.call('ZREM', lock.queue, writer.entry, 'seen ' .. writer.attempt)
    if notify(lock, writer.channel, writer.attempt, token, call.time) then
      -- If all but the queue had expired, nothing else keeps readers out for the next writer.
      redis.call('HSET', lock.key, 'write', ends .. ' ' .. writer.owner .. ' ' .. writer.attempt,
        'token', string.format('%.0f', token), 'writer_wait_until', math.max(ends, lock.wait_until))
      pcall(end_waiting, lock, call)
      return true
    end
    redis.pcall('DECRBY', lock.fence, writer.tokens) -- no client has them
    shorten(lock, pttl)
  end
  lock.is_unfinished = lock.is_unfinished or not reader
  return false
end

-- Grants the lock, for a claim: to all readers that queued before the last writer left; else to the
-- writer that has waited longest; else to all readers. While readers hold the lock (an expired one
-- counts until other_reader removes it), it is granted to more readers if no writer waits, or to
-- the only reader if it waits to write.
--
-- If there is no token for a waiter that may enter, lock.no_token says why: a release still frees
-- the lock, but no other attempt may be granted it before the waiter.
local function admit_waiters(lock, call)
  if redis.call('EXISTS', lock.queue) == 0 then return end
  if read_state(lock, call) or unexpired(lock.write, call.now) then return end
  local writer_left = lock.writer_left
  if lock.write then -- its writer is dead
    end_write(lock, call)
    writer_left = call.time - 1
  end
  local waited = writer_left and string.format('%.0f', writer_left - 2^52)
  if lock.readers > 0 then
    if lock.wait_until <= call.now then
      admit_readers(lock, '(0', call)
    elseif not (waited and admit_readers(lock, waited, call)) and not lock.is_unfinished then
      local _, upgrader = unexpired(lock.upgrade, call.now)
      local is_alone = lock.readers == 1 and upgrader
        and redis.call('HEXISTS', lock.key, 'read:' .. upgrader) == 1
      if is_alone and admit_writer(lock, upgrader, call) then return end
      if no_writer_waits(lock, call) then
        redis.call('HDEL', lock.key, 'writer_wait_until', 'upgrade')
        admit_readers(lock, '(0', call)
      end
    end
    return
  end
  -- All but the queue has expired: then age decides, and the writer that waits keeps new readers
  -- out again.
  local writer = lock.pttl == -2 and first_writer(lock, call)
  if writer then waited = string.format('(%.0f', writer.place - 2^52) end
  if waited and admit_readers(lock, waited, call) then
    -- Others of them may follow in later batches, after these have left.
    if writer then
      redis.call('HSET', lock.key, 'writer_wait_until', call.now + writer.claim_ms,
        'writer_left', string.format('%.0f', writer.place - 1))
    end
  elseif not lock.is_unfinished and not admit_writer(lock, nil, call)
    and not lock.is_unfinished then
    admit_readers(lock, '(0', call)
  end
end

-- After the end of a hold, which has no error any more: if the admission is refused, as without a
-- right, waiters find the lock free when they poll.
local function admit_next(lock, call)
  pcall(admit_waiters, lock, call)
  pcall(delete_if_free, lock)
end

-- The owner's holds on one side: their end, the attempts, whether this one is among them, and the
-- others.
local function find_holds(lock, side, call)
  local ends, attempts = unexpired(lock[side], call.now) -- lock.read or lock.write
  if side == 'write' then
    local writer, rest = string.match(attempts or '', '^([^ ]+) (.+)$')
    attempts = writer == lock.owner and rest or nil
  end
  local holds, others = {ends = ends, attempts = attempts, is_held = attempts == lock.attempt}, {}
  for attempt in string.gmatch(not holds.is_held and attempts or '', '[^ ]+') do
    if attempt == lock.attempt then holds.is_held = true else others[#others + 1] = attempt end
  end
  holds.others, holds.left = table.concat(others, ' '), #others
  return holds
end

-- Ends the hold of the attempt on one side.
local function end_hold(lock, side, holds, call)
  local field = side == 'read' and 'read:' .. lock.owner or 'write'
  if holds.left > 0 then
    local owner = side == 'write' and lock.owner .. ' ' or ''
    redis.call('HDEL', lock.key, 'read:') -- see end_write
    redis.call('HSET', lock.key, field, holds.ends .. ' ' .. owner .. holds.others)
  elseif side == 'write' then
    end_write(lock, call)
  else
    redis.call('HDEL', lock.key, 'read:') -- see end_write
    redis.call('HINCRBY', lock.key, 'readers', -1)
    redis.call('HDEL', lock.key, field)
  end
end

-- Instead of that, for the only hold of its owner: it stays for a time, and belongs to no attempt,
-- since a renewal that arrives late must not extend it.
local function keep_hold(lock, side, _, call)
  local kept, ends, readers = 'kept-' .. lock.attempt, call.now + call.keep_ms, lock.readers
  redis.call('HDEL', lock.key, 'read:') -- see end_write
  reserve(lock, ends, call)
  if side == 'write' then
    redis.call('HSET', lock.key, 'write', ends .. ' ' .. kept .. ' ' .. kept)
  else
    -- It may have been kept before, if a late delivery granted it again since.
    local earlier = redis.call('HGET', lock.key, 'read:' .. kept)
    ends = math.max(ends, unexpired(earlier, call.now) or 0)
    redis.call('HSET', lock.key, 'read:' .. kept, ends .. ' ' .. kept)
    redis.call('HDEL', lock.key, 'read:' .. lock.owner)
    if earlier then readers = redis.call('HINCRBY', lock.key, 'readers', -1) end
  end
  -- If this is refused, the key lasts longer than the hold, which has its own end.
  if side == 'write' or readers == 1 then pcall(shorten, lock, math.max(ends - call.now, 10)) end
end

-- ------------------------------------------------------------------------------------- read, write

local operation
if is_acquire then
  -- Quorum: accepts the proposed tokens. Those of a writer must be larger than all that this node
  -- has accepted. An attempt that writes may propose its own `again`, and so may a repair: if
  -- larger ones were accepted since, it keeps the current one. A reader gets the largest one: it is
  -- larger than the tokens of all writers before and, once a majority knows it, smaller than those
  -- of all after.
  local function accept(lock, current, again, call)
    local node, accepted = call.admission or {}, redis.call('GET', lock.fence) or '0'
    local first, least, is_repair = lock.proposal, node[2] or '0', call.purpose == 'repair'
    if not string.find(accepted .. ' ' .. least, '^%d+ %d+$') or tonumber(accepted) >= 2^53 then
      return nil, {err = 'ERR the largest accepted token is spoilt'}
    end
    local highest, last = math.max(tonumber(accepted), tonumber(least)), first + call.count - 1
    if call.verb == 'read' then
      first = math.max(first, highest)
      last = first
    elseif highest >= first and not ((again or is_repair) and highest == last) then
      if not is_repair then return nil, {-8, highest} end
      first = nil
    end
    if call.is_trial then return nil, -10 end
    if not first then return current or 0 end
    if call.node and last > tonumber(node[3] or 0) then
      redis.call('HSET', call.node, 'high', string.format('%.0f', last))
      node[3] = last
    end
    lock.accepted = accepted
    redis.call('SET', lock.fence, string.format('%.0f', last), 'PX', call.token_ttl_ms)
    return first
  end

  -- The token of a hold, or nil and a refusal. A hold inside one to write has the `current` token
  -- of the latter, unless the nodes of a quorum know different ones ("nested"). An attempt that
  -- is_only may propose its own token again. In a trial (see `all`), -10: it would be granted.
  local function take_token(lock, current, is_only, is_again, call)
    if lock.proposal and (is_only or call.purpose == 'nested') then
      return accept(lock, current, is_again, call)
    end
    local token
    if lock.proposal or not call.has_token then
      token = lock.proposal and current or 0
    elseif (current or 0) > 0 then
      token = current
    end
    if call.is_trial then
      local is_known = token or call.verb == 'read' and (to_token(lock.token) or -1) >= call.minimum
      local last = not is_known and redis.call('GET', lock.fence) or '0'
      local counter = (last == '0' or string.find(last, '^%-?[1-9]%d*$')) and tonumber(last) or 2^53
      local is_good = counter + (call.verb == 'write' and call.count or 0) < 2^53
        or call.verb == 'read' and (to_token(lock.token or last) or -1) >= call.minimum -- as 007
      return nil, is_good and -10 or {err = 'ERR the fencing counter is spoilt, or at 2^53'}
    end
    if token then return token end
    if call.verb == 'read' then return shared_token(lock, call) end
    return next_tokens(lock.fence, call.minimum, call.count, call.token_ttl_ms)
  end

  -- The lock is free, and no attempt waits.
  local function hold_alone(lock, call)
    local token, refusal = take_token(lock, nil, true, false, call)
    if not token then return refusal end
    local mode = 'sole ' .. call.verb .. ' ' .. lock.owner .. ' ' .. lock.attempt
    if call.verb == 'write' and token > 0 then
      redis.call('HSET', lock.key, 'mode', mode, 'token', string.format('%.0f', token))
    else
      redis.call('HSET', lock.key, 'mode', mode)
    end
    local kept = redis.pcall('PEXPIRE', lock.key, call.ttl_ms)
    lock.is_alone = true
    if kept == 1 then return token end
    redis.call('DEL', lock.key)
    return kept
  end

  -- Whether a reader must stay out for a writer that waits. Readers that queued before the writer,
  -- or before the last writer left, go first all the same, even if they have lost their places.
  local function must_wait(lock, call)
    local writer = first_writer(lock, call)
    local score = call.claim and redis.call('ZSCORE', lock.queue, lock.entry)
    local since = score and tonumber(score) + 2^52 or call.claim and tonumber(lock.number)
    local goes_first = since and (writer and since < writer.place
      or lock.writer_left and since <= lock.writer_left)
    if (writer or lock.is_unfinished) and not goes_first then return true end
    if not writer and not lock.is_unfinished and not call.is_trial then
      redis.call('HDEL', lock.key, 'writer_wait_until', 'upgrade')
    end
    return false
  end

  -- Admits the next waiters. In a trial, it only answers if one of them is earlier, or if there are
  -- too many to check: another request removes those that are dead.
  local function admit_earlier(lock, call)
    lock.scores = nil -- admission removes waiters
    if not call.is_trial then
      admit_waiters(lock, call)
      read_state(lock, call)
      return nil
    end
    local entries = redis.call('ZRANGE', lock.queue, '0', '127', 'WITHSCORES')
    local own, first, busy_ms = nil, 2^52, nil
    if tonumber(entries[256] or 2^52) < 2^52 then return {10, call.time} end
    for i = 1, #entries, 2 do
      local attempt, kind, claim_ms = parse(entries[i])
      local place = tonumber(entries[i + 1]) % 2^52
      local is_own = attempt == lock.attempt -- and if it is dead, the grant would remove it
      if (kind == 'read' or kind == 'write') and (is_own or place < first)
        and is_alive(lock.queue, attempt, place, claim_ms, call.time) then
        if is_own then own = place else first, busy_ms = place, tonumber(claim_ms) end
      end
    end
    -- Where not all but the queue has expired, others may come first in spite of their age.
    local is_first = own and own < first and lock.pttl == -2
    return busy_ms and not is_first and {busy_ms, call.time} or nil
  end

  local function read(lock, call)
    local now = call.now
    if lock.pttl == -2 and redis.call('EXISTS', lock.queue) == 0 then
      return hold_alone(lock, call)
    end
    if not unexpired(lock.write, now) and (lock.readers == 0 or lock.write) then
      local answer = admit_earlier(lock, call)
      if answer then return answer end
    end
    local write_ends, write = unexpired(lock.write, now)
    local writer = write and string.match(write, '^[^ ]+')
    local read_ends, attempts = unexpired(lock.read, now)
    if read_ends then
      local is_held = has(attempts, lock.attempt)
      if not is_held and count_attempts(attempts) >= call.depth then return -4 end
      if not is_held then attempts = attempts .. ' ' .. lock.attempt end
    elseif writer and writer ~= lock.owner then
      return queue_to_read(lock, write_ends - now, call)
    elseif not writer and lock.wait_until > now and must_wait(lock, call) then
      return queue_to_read(lock, lock.wait_until - now, call)
    elseif lock.no_token then
      return lock.no_token
    elseif lock.is_unfinished then
      return queue_to_read(lock, 10, call)
    elseif is_full(lock, false, call) then
      return -7
    end
    if lock.write and not write then lock.token = nil end -- see end_write
    local current = to_token(lock.token)
    local outer = writer and current
    local token, problem = take_token(lock, outer, not outer, true, call)
    if not token then return problem end
    local ends = math.max(now + call.ttl_ms, read_ends or 0)
    reserve(lock, ends, call)
    if lock.write and not write then redis.call('HDEL', lock.key, 'write', 'token') end
    if lock.wait_until > 0 and lock.wait_until <= now then
      redis.call('HDEL', lock.key, 'writer_wait_until')
    end
    leave_queue(lock, 'read', call)
    redis.call('HSET', lock.key, 'read:' .. lock.owner, ends .. ' ' .. (attempts or lock.attempt),
      'readers', lock.readers + (lock.read and 0 or 1))
    -- A second delivery and later readers get this token again. Not inside a hold to write without
    -- a token: a nested hold to write would get it too, and it may be the former writer's.
    if token > 0 and token ~= current and (current or not write) then
      redis.call('HSET', lock.key, 'token', string.format('%.0f', token))
    end
    pcall(admit_waiters, lock, call) -- if this is refused, they poll
    return token
  end

  -- Once more by its owner, or a second delivery.
  local function write_again(lock, write_ends, attempts, call)
    local is_held = has(attempts, lock.attempt)
    if not is_held and count_attempts(attempts) >= call.depth then return -4 end
    local token, refusal =
      take_token(lock, to_token(lock.token), attempts == lock.attempt, is_held, call)
    if not token then return refusal end
    if not is_held then attempts = attempts .. ' ' .. lock.attempt end
    local ends = math.max(call.now + call.ttl_ms, write_ends)
    reserve(lock, ends, call)
    leave_queue(lock, 'write', call)
    redis.call('HSET', lock.key, 'write', ends .. ' ' .. lock.owner .. ' ' .. attempts)
    if token > 0 then redis.call('HSET', lock.key, 'token', string.format('%.0f', token)) end
    if lock.wait_until > 0 then pcall(end_waiting, lock, call) end
    return token
  end

  local function others_read(lock, now)
    return lock.readers > (unexpired(lock.read, now) and 1 or 0)
  end

  local function write(lock, call)
    local now, other_ends = call.now, nil
    -- (What a queued writer polls for is stored in the longer form.)
    if lock.pttl == -2 and (lock.proposal or not lock.number)
      and redis.call('EXISTS', lock.queue) == 0 then
      return hold_alone(lock, call)
    end
    if not unexpired(lock.write, now) then
      other_ends = others_read(lock, now) and other_reader(lock, call)
      if not other_ends and not unexpired(lock.read, now) then
        local answer = admit_earlier(lock, call)
        if answer then return answer end
        other_ends = others_read(lock, now) and now + math.max(lock.pttl, 1)
      end
    end
    local write_ends, words = unexpired(lock.write, now)
    local writer, attempts = string.match(words or '', '^([^ ]+) (.+)$')
    if writer == lock.owner then return write_again(lock, write_ends, attempts, call) end
    other_ends = write_ends or other_ends
    if other_ends then return queue_to_write(lock, other_ends - now, call) end
    if lock.no_token then return lock.no_token end
    if lock.is_unfinished then
      if call.claim then enqueue(lock, lock.number, call) end
      return {10, call.time}
    end
    local token, refusal = take_token(lock, nil, true, false, call)
    if not token then return refusal end
    reserve(lock, now + call.ttl_ms, call)
    local _, upgrader = unexpired(lock.upgrade, now)
    redis.call('HDEL', lock.key, 'token', upgrader == lock.owner and 'upgrade' or 'token')
    leave_queue(lock, 'write', call)
    local hold = now + call.ttl_ms .. ' ' .. lock.owner .. ' ' .. lock.attempt
    redis.call('HSET', lock.key, 'write', hold)
    if token > 0 then redis.call('HSET', lock.key, 'token', string.format('%.0f', token)) end
    pcall(end_waiting, lock, call)
    return token
  end

  operation = verb == 'read' and read or write
end

-- ------------------------------------------------------------------------------ release, downgrade

-- The answer with which the attempt has ended, if that is marked; nil if not.
local function recall(queue, attempt, call)
  local mark = tonumber(redis.call('ZSCORE', queue, 'ended ' .. attempt))
  return mark and mark > 2^52 + call.time and (mark - 2^52) % 1000000 - 10 or nil
end

-- Writes down that the attempt has ended, with this answer. The score of the mark: 2^52, the second
-- until which it counts, in microseconds, and the answer plus 10.
local function record_end(lock, answer, call)
  if not call.remembers then return end
  -- A full server refuses ZADD as the first write of a script. ZREM comes first, of nothing: if it
  -- removed the last entry, the queue would be deleted and created again.
  redis.call('ZREM', lock.queue, '')
  local mark = string.format('%.0f', 2^52 + call.time - call.time % 1000000 + 60000010 + answer)
  redis.call('ZADD', lock.queue, mark, 'ended ' .. lock.attempt)
  lock.has_mark = true -- removed if this or what follows is refused
  redis.call('PEXPIRE', lock.queue, '60000')
end

-- Leaves the queue on both sides.
local function give_up(lock, call)
  leave_queue(lock, 'read', call)
  if not leave_queue(lock, 'write', call) then return end
  local _, upgrader = string.match(lock.upgrade or '', '^(%d+) (.+)$')
  if upgrader == lock.owner then
    -- Another attempt of the owner, which reads, may still wait to write (place 0), and needs the
    -- mark: without it another reader would also queue to write, and each would wait for the other.
    local is_needed = false
    local entries = redis.pcall('ZRANGEBYSCORE', lock.queue, 0, 0, 'LIMIT', 0, 64)
    for _, entry in ipairs(unless_emptied(entries) or {}) do
      local attempt, kind, _, _, owner = parse(entry)
      is_needed = is_needed or attempt and kind == 'write' and owner == lock.owner
    end
    if not is_needed then redis.call('HDEL', lock.key, 'upgrade') end
  end
  pcall(end_waiting, lock, call)
end

-- The counter goes back to the last token that was used, or if none was, by all that were reserved,
-- unless it was raised since: it must not outrun the clock, from which a lost one is set anew. Of a
-- single token, nothing is given back: the attempt may have acquired the lock without one.
-- Returns by how much. If this is refused, as without a right, it stays where it is.
local function give_back(fence, last_token, call)
  local counter = redis.pcall('GET', fence)
  if type(counter) ~= 'string' or not string.find(counter, '^%d+$') then return 0 end
  local spare, most = counter - last_token, call.count - 1
  if last_token == '0' and most > 0 then spare, most = call.count, counter + 0 end
  if spare <= 0 or spare > most then return 0 end
  return type(redis.pcall('DECRBY', fence, spare)) == 'number' and spare or 0
end

-- What the owner's last hold to write has reserved, and not used.
local function give_back_spare(lock, writes, call)
  local is_over = writes.left == 0 and lock.readers == 0
  if is_over and lock.number and (lock.number ~= '0' or lock.owner == lock.attempt) then
    give_back(lock.fence, lock.number, call)
  end
end

local function release(lock, call)
  -- A second delivery gets the first answer, and changes nothing.
  local recalled = call.remembers and recall(lock.queue, lock.attempt, call)
  if recalled then return recalled end
  if read_state(lock, call) then
    record_end(lock, -2, call)
    leave_queue(lock, 'read', call)
    leave_queue(lock, 'write', call)
    return -2
  end
  expand_sole_hold(lock, call)
  local writes, reads = find_holds(lock, 'write', call), find_holds(lock, 'read', call)
  local answer = (writes.is_held or reads.is_held) and 1 + writes.left + reads.left or 0
  record_end(lock, answer, call)
  give_up(lock, call)
  -- Holds that have expired keep no waiter out.
  if lock.read and not reads.ends then other_reader(lock, call) end
  if lock.write and not writes.ends then end_write(lock, call) end
  local ending = call.keep_ms and answer == 1 and keep_hold or end_hold
  if writes.is_held then
    ending(lock, 'write', writes, call)
    give_back_spare(lock, writes, call)
  end
  if reads.is_held then ending(lock, 'read', reads, call) end
  admit_next(lock, call)
  return answer
end

local function downgrade(lock, call)
  if read_state(lock, call) then return -2 end
  expand_sole_hold(lock, call)
  local writes, reads = find_holds(lock, 'write', call), find_holds(lock, 'read', call)
  if not writes.is_held and not reads.is_held then return 0 end
  local ends, attempts = call.now + call.ttl_ms, reads.attempts
  if not reads.is_held then attempts = (attempts and attempts .. ' ' or '') .. lock.attempt end
  redis.call('HDEL', lock.key, 'read:') -- see end_write
  reserve(lock, ends, call)
  if writes.is_held then
    end_hold(lock, 'write', writes, call)
    give_back_spare(lock, writes, call)
  end
  local hold = math.max(ends, reads.ends or 0) .. ' ' .. attempts
  redis.call('HSET', lock.key, 'read:' .. lock.owner, hold,
    'readers', lock.readers + (lock.read and 0 or 1))
  if writes.is_held then pcall(admit_waiters, lock, call) end -- as in admit_next
  return call.time
end

-- Gives the hold to another attempt of its owner, and extends it. What still arrives of the former
-- one must not be granted anything: it has ended. A second delivery writes as well: a client that
-- waits for replicas counts what this connection has written.
local function adopt(lock, call)
  local successor, field, value = call.successor, nil, nil
  if #successor > 128 or string.find(successor, ' ', 1, true) or successor == lock.attempt then
    return -5
  end
  if recall(lock.queue, successor, call) then return -1 end
  if read_state(lock, call) then return -2 end
  local side, sole = string.match(lock.mode or '', '^(sole [^ ]+ )(.+)$')
  if sole == lock.owner .. ' ' .. lock.attempt then
    field, value = 'mode', side .. lock.owner .. ' ' .. successor
  end
  for _, one in ipairs(side and {} or {'read', 'write'}) do
    local holds = find_holds(lock, one, call)
    if holds.is_held and not has(holds.others, successor) then
      local owner = one == 'write' and lock.owner .. ' ' or ''
      local ends = math.max(holds.ends, call.now + call.ttl_ms)
      field = one == 'write' and 'write' or 'read:' .. lock.owner
      value = ends .. ' ' .. owner .. (holds.left > 0 and holds.others .. ' ' or '') .. successor
    end
  end
  if not field then
    lock.attempt = successor
    return renew(lock, call)
  end
  record_end(lock, 0, call)
  if lock.pttl < call.ttl_ms + 0 then redis.call('PEXPIRE', lock.key, call.ttl_ms) end
  redis.call('HSET', lock.key, field, value)
  return call.time
end

-- With force: revokes the holds of all readers, of the writer, or of one owner on one side. The
-- holders learn of it from their next renewals or releases.
local function revoke(lock, call)
  local recalled = recall(lock.queue, lock.attempt, call)
  if recalled then return recalled end
  local refusal, answer, is_meant = read_state(lock, call), 0, false
  if refusal then
    record_end(lock, refusal, call)
    return refusal
  end
  expand_sole_hold(lock, call)
  if call.force == 'write' then
    local _, words = unexpired(lock.write, call.now)
    local writer = words and string.match(words, '^[^ ]+')
    is_meant = writer and (not call.only_from or writer == call.only_from)
    answer = is_meant and count_attempts(words) - 1 or 0
  elseif call.only_from then
    is_meant = unexpired(lock.read, call.now)
    answer = is_meant and 1 or 0
  elseif lock.readers ~= 0 then
    is_meant = other_reader(lock, call)
    answer = is_meant and lock.readers or 0
  end
  record_end(lock, answer, call)
  if not is_meant then return 0 end
  if call.force == 'write' then
    -- The token of the former holder is not the last one any more, as its client can find out.
    if redis.call('EXISTS', lock.fence) == 1 then redis.pcall('INCRBY', lock.fence, '1') end
    end_write(lock, call)
  elseif call.only_from then
    redis.call('HDEL', lock.key, 'read:') -- see end_write
    redis.call('HINCRBY', lock.key, 'readers', -1)
    redis.call('HDEL', lock.key, 'read:' .. call.only_from)
  elseif not unexpired(lock.write, call.now)
    and redis.call('ZCOUNT', lock.queue, '-inf', '(4503599627370496') == 0 then
    redis.call('DEL', lock.key) -- nothing is granted the lock in this call
  else
    local fields = {'readers'}
    for _, field in ipairs(redis.call('HKEYS', lock.key)) do
      if string.sub(field, 1, 5) == 'read:' then fields[#fields + 1] = field end
    end
    remove_fields(lock, fields)
    call.work = call.work + answer
  end
  admit_next(lock, call)
  return answer
end

-- ---------------------------------------------------------------------------------- the rare cases

-- Adds a holder to an inspection, unless it is of one owner, and this is another one.
local function add_holder(found, side, owner, holds, pttl, only_from)
  if only_from and owner ~= only_from then return end
  for _, word in ipairs({side, owner, holds, pttl}) do found[#found + 1] = word end
end

local function inspect(lock, call)
  local refusal = read_state(lock, call)
  if refusal then return {refusal, '0', 0, call.time} end
  local waiting = redis.pcall('ZCOUNT', lock.queue, '-inf', '(4503599627370496')
  waiting = unless_wrong_type(waiting) or 0
  local writers = waiting > 0 and redis.call('ZCOUNT', lock.queue, 0, '(4503599627370496') or 0
  local token = unless_wrong_type(redis.pcall('GET', lock.fence))
  local found = {1, to_token(token) and token or '0', waiting, call.time, writers, lock.readers}
  local side, sole_owner = string.match(lock.mode or '', '^sole ([^ ]+) ([^ ]+) [^ ]+$')
  if side then
    if side == 'read' then found[6] = 1 end
    side = side == 'read' and 'read' or 'write'
    add_holder(found, side, sole_owner, 1, lock.pttl, call.only_from)
    return found
  end
  local write_ends, words = unexpired(lock.write, call.now)
  if write_ends then
    local writer, holds = string.match(words, '^([^ ]+) (.+)$')
    add_holder(found, 'write', writer, count_attempts(holds), write_ends - call.now, call.only_from)
  end
  local sample, readers = {'read:' .. lock.owner, lock.read}, 0
  if not call.only_from then sample = redis.call('HRANDFIELD', lock.key, 512, 'WITHVALUES') end
  call.work = call.work + #sample / 2
  for i = 1, #sample, 2 do
    local ends, holds = unexpired(sample[i + 1], call.now)
    if ends and string.sub(sample[i], 1, 5) == 'read:' then
      readers, call.work = readers + 1, call.work + #holds / 64
      if readers <= 500 then
        add_holder(found, 'read', string.sub(sample[i], 6), count_attempts(holds), ends - call.now)
      end
    end
  end
  if not call.only_from and #sample < 2 * 512 then found[6] = readers end
  return found
end

-- It queues and grants nothing, so a late or a second delivery only makes waiters count as alive
-- that still have a place.
local function wait(lock, call)
  local entries, fields = {}, {'mode', 'write', 'writer_wait_until', 'writer_left'}
  for i, waiter in ipairs(call.waiters) do
    entries[i], fields[4 + i] = entry_of(waiter, 'read', call), 'read:' .. waiter.owner
  end
  local found = unless_wrong_type(redis.pcall('HMGET', lock.key, unpack(fields)))
  local places = unless_wrong_type(redis.pcall('ZMSCORE', lock.queue, unpack(entries)))
  local pttl = redis.call('PTTL', lock.key)
  if not found or not places or pttl < 0 then return -10 end
  -- For how long readers stay out: another owner writes, or waits to write.
  local writer, busy_ms = string.match(found[1] or '', '^sole write ([^ ]+)'), pttl
  if not writer then
    local write_ends, write = unexpired(found[2], call.now)
    writer = write and string.match(write, '^[^ ]+')
    busy_ms = (write_ends or tonumber(found[3]) or 0) - call.now
  end
  if busy_ms < 1 then return -10 end
  -- Readers that queued before the last writer left go before the next one: see must_wait.
  local first_until = not writer and tonumber(found[4]) or 0
  local answer, marks = {busy_ms, call.time}, {}
  local seen_until = string.format('%.0f', 2^52 + 61000000 + call.time + call.claim * 1000)
  for i, waiter in ipairs(call.waiters) do
    if places[i] and places[i] + 2^52 > first_until and waiter.owner ~= writer
      and not unexpired(found[4 + i], call.now) then
      marks[#marks + 1] = seen_until
      marks[#marks + 1] = 'seen ' .. waiter.attempt
    else
      answer[#answer + 1] = i
    end
  end
  if marks[1] then
    redis.call('ZADD', lock.queue, unpack(marks))
    redis.call('PEXPIRE', lock.queue, '60000')
  end
  return answer
end

operation = operation or verb == 'inspect' and inspect or verb == 'wait' and wait
  or verb == 'downgrade' and downgrade or successor and adopt or force and revoke or release
serve(operation, locks, call)
for _, lock in ipairs(again) do serve(operation, serve(wait_for_writer, {lock}, call), call) end

-- All or nothing: these were trials. All are granted if each would be.
if call.is_trial then
  call.is_trial = false
  local is_blocked = false
  for i = 1, n do is_blocked = is_blocked or answers[i] ~= -10 end
  for _, lock in ipairs(is_blocked and {} or locks) do -- a grant may have to be taken back
    local refusal = redis.pcall('HDEL', lock.key, 'read:')
    if type(refusal) == 'table' then
      is_blocked, answers[lock.index] = true, to_answer(false, refusal)
    end
  end
  if not is_blocked then
    for _, lock in ipairs(locks) do
      lock.checks_left = 1000 -- as many as the trial left to do
      local writes, reads = find_holds(lock, 'write', call), find_holds(lock, 'read', call)
      lock.was_held, lock.was_inside = writes.is_held or reads.is_held, writes.attempts ~= nil
    end
    serve(operation, serve(wait_for_writer, locks, call), call)
    for i = 1, n do
      is_blocked = is_blocked or type(answers[i]) ~= 'number' or answers[i] < 0
    end
    -- An error that could not be foreseen, as a missing right, takes all back.
    for _, lock in ipairs(is_blocked and locks or {}) do
      if type(answers[lock.index]) == 'number' and answers[lock.index] >= 0 then
        lock.number = nil -- it was a place, not a token
        -- Before a waiter gets a token. Inside another hold, that keeps the one it has now, and so
        -- do readers that came with it.
        if lock.accepted and (lock.is_alone or verb == 'write' and not lock.was_inside) then
          redis.pcall('SET', lock.fence, lock.accepted, 'PX', token_ttl_ms)
        end
        local is_gone = lock.is_alone and redis.pcall('DEL', lock.key) == 1 -- needs fewer rights
        if not (lock.was_held or is_gone) then pcall(release, lock, call) end
        answers[lock.index] = -10
      end
    end
  end
end

-- An error here has no effect on a lock, so it is not answered.
for i = 1, cleans and n or 0 do
  if (time + i) % 16 == 1 and call.work <= 2000 then pcall(clean, KEYS[n + i], 16, call) end
end
if n == 1 and type(answers[1]) == 'string' then return {err = answers[1]} end
return answers
