local ends = now + ttl_ms

if redis.call('EXISTS', KEYS[4]) == 1 then return -1 end
local heir, claim_ms, its_owner = string.match(waiter, '^(%S+) ([1-9]%d?%d?%d?%d?) (%S+) %S*$')
if waiter ~= '' and (heir ~= attempt or its_owner ~= owner) then return -5 end
local waiting = redis.call('ZCARD', KEYS[3])
--@include unexpired

--@include has

--@include count

--@include keep_until

--@include end_write

--@include writer_waits

--@include admit_waiters

--@include other_reader

--@include expand_sole_hold

local function look()
  return redis.pcall('HMGET', KEYS[1], 'write', 'readers', 'read:' .. owner, 'upgrade', 'gate')
end
local state = look()
if state.err then return -2 end
if redis.call('PTTL', KEYS[1]) == -1 then return -3 end
--@include is_foreign

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
