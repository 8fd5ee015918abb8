-- rwlock/renew: generated from its source in lua/src, do not edit.
-- rwlock/renew: extends the lease of one hold, if its owner still has it.
--
-- KEYS[1]  lock      hash: the holds, and the field `mode`
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  ttl_ms    1 to 9999999999, counted from now
-- ARGV[3]  owner     as in acquire; default: the attempt
--
-- Returns  time   held for at least ttl_ms from now; the server's clock in microseconds
--          0      lost: expired, released, or another owner's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- A second delivery extends the lease again, by as little as the deliveries are apart. It changes
-- no other owner's hold, and never shortens the lease of another hold of the same owner.
local attempt, ttl_ms, owner = unpack(ARGV)
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
if not owner or owner == '' then
  owner = attempt
elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
  return -5
end

local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)

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

if read_state() then return -2 end
local ttl = tonumber(ttl_ms)
local sole = string.match(state.mode or '', '^sole [^ ]+ (.+)$')
if sole then
  if sole ~= owner .. ' ' .. attempt then return 0 end
  if state.pttl < ttl then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
  return time
end
local field, ends, words = 'read:' .. owner, unexpired(state.read)
if not words or not has(words, attempt) then
  field, ends, words = 'write', unexpired(state.write)
  if not words or string.match(words, '^[^ ]+') ~= owner or not has(words, attempt) then return 0 end
end
if ends < now + ttl then
  -- A full server refuses HSET as the first write of a script.
  if state.pttl < ttl then
    redis.call('PEXPIREAT', KEYS[1], now + ttl)
  else
    redis.call('HDEL', KEYS[1], 'read:')
  end
  redis.call('HSET', KEYS[1], field, now + ttl .. ' ' .. words)
end
return time
