-- reentrant/renew: generated from its source in lua/src, do not edit.
-- reentrant/renew: extends the lease of one hold, if its owner still has it.
--
-- KEYS[1]  lock      hash: the owner and its count, `mode`, and `:<attempt>` for each hold
-- ARGV[1]  attempt   as in acquire
-- ARGV[2]  ttl_ms    1 to 9999999999, counted from now
-- ARGV[3]  owner     as in acquire
--
-- Returns  time   held for at least ttl_ms from now; the server's clock in microseconds
--          0      lost: expired, released, or another owner's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- A second delivery extends the lease again, by as little as the deliveries are apart. It never
-- creates the key, and never shortens the lease of another hold of the same owner.
local attempt, ttl_ms, owner = unpack(ARGV)
if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
-- `mode` is a field of the hash that says its kind.
if not owner or owner == '' or owner == 'mode' or #owner > 256 or string.byte(owner) == 58
  or string.find(owner, ' ', 1, true) then
  return -5
end

-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end

-- The token of a re-entrant lock, 0 if it has none; nil if the hash is something else. A Redisson
-- RLock is one field `<UUID>:<thread>` -> count.
local function reentrant_token(mode)
  if mode then return to_token(string.match(mode, '^reentrant (%d+)$')) end
  local field = redis.call('HLEN', KEYS[1]) == 1 and redis.call('HRANDFIELD', KEYS[1])
  local is_redisson = field and string.find(field, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    and tonumber(redis.call('HGET', KEYS[1], field))
  return is_redisson and 0 or nil
end

local held = redis.pcall('HMGET', KEYS[1], owner, ':' .. attempt, 'mode')
if held.err then return -2 end
local pttl = redis.call('PTTL', KEYS[1])
if pttl ~= -2 and not reentrant_token(held[3]) then return -2 end
if not held[1] or not held[2] then return 0 end
if pttl < tonumber(ttl_ms) then redis.call('PEXPIRE', KEYS[1], ttl_ms) end
local clock = redis.call('TIME')
return clock[1] * 1000000 + clock[2]
