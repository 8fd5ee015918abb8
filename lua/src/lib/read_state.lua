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
