--@include is_channel

-- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol.
local function parse(entry)
  local its_attempt, its_kind, ms, its_channel, its_owner, its_depth =
    string.match(entry, '^([^ ]+) (%l+) (%d+) ([^ ]*) ([^ ]*) ?(%d*)$')
  if not its_attempt then return nil end
  if its_channel ~= '' and not is_channel(its_channel) then return nil end -- written by hand
  return its_attempt, its_kind, tonumber(ms), its_channel, its_owner, its_depth
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark.
local function is_alive(its_attempt, its_place, ms)
  if its_place < 0 then its_place = its_place + 2^52 end
  if math.abs(time - its_place) < ms * 1000 then return true end -- also if the clock was set back a little
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. its_attempt)) or 0) > 2^52 + 61000000 + time
end
