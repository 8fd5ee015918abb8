-- rwlock/inspect: generated from its source in lua/src, do not edit.
-- rwlock/inspect: the holders of the lock, their holds, their remaining times, and the number of
-- waiters. Writes nothing.
--
-- KEYS[1]  lock      hash: the holds, and the field `mode`
-- KEYS[2]  fence     string: the last fencing token
-- KEYS[3]  waiters   zset: waiters by their places, and marks
-- ARGV[1]  owner     the owner whose holds are listed; default: those of all owners
--
-- Returns  {1, token, waiters, time, waiting_writers, readers}   then for each holder: side, owner,
--             count, pttl
--          {-2, '0', 0, time}   refused: the key holds something else
--          {-3, '0', 0, time}   refused: the key has no TTL
--
-- token is a string, '0' if there is none. The writer comes first, side "write"; then readers, side
-- "read": of more than five hundred, a sample. waiters counts both sides. readers counts all: of
-- more than five hundred, also expired ones.
local owner = ARGV[1] or ''
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local now = math.floor(time / 1000)
-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end
local waiting = redis.pcall('ZCOUNT', KEYS[3], '-inf', '(4503599627370496')
if type(waiting) == 'table' then waiting = 0 end
local token = redis.pcall('GET', KEYS[2])
if type(token) ~= 'string' or not to_token(token) then token = '0' end
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

local refusal = read_state()
if refusal then return {refusal, '0', 0, time} end
local writers = waiting > 0 and redis.call('ZCOUNT', KEYS[3], 0, '(4503599627370496') or 0
local found = {1, token, waiting, time, writers, state.readers}
local function add(side, holder_owner, holds, pttl)
  if owner ~= '' and holder_owner ~= owner then return end
  for _, word in ipairs({side, holder_owner, holds, pttl}) do found[#found + 1] = word end
end
local side, holder_owner = string.match(state.mode or '', '^sole ([^ ]+) ([^ ]+) [^ ]+$')
if side then
  if side == 'read' then found[6] = 1 end
  add(side == 'read' and 'read' or 'write', holder_owner, 1, state.pttl)
  return found
end
local ends, words = unexpired(state.write)
if ends then
  local writer, attempts = string.match(words, '^([^ ]+) (.+)$')
  add('write', writer, count(attempts), ends - now)
end
if owner ~= '' then
  local till, attempts = unexpired(state.read)
  if till then add('read', owner, count(attempts), till - now) end
  return found
end
local sample, readers = redis.call('HRANDFIELD', KEYS[1], 512, 'WITHVALUES'), 0
for i = 1, #sample, 2 do
  local till, attempts = unexpired(sample[i + 1])
  if till and string.sub(sample[i], 1, 5) == 'read:' then
    readers = readers + 1
    if readers <= 500 then add('read', string.sub(sample[i], 6), count(attempts), till - now) end
  end
end
if #sample < 2 * 512 then found[6] = readers end
return found
