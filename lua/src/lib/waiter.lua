-- A waiter: `attempt kind claim_ms channel owner max_depth`. Nil: no waiter of this protocol.
local function parse(entry)
  local its_attempt, its_kind, ms, its_channel, its_owner, its_depth =
    string.match(entry, '^([^ ]+) (%l+) (%d+) ([^ ]*) ([^ ]*) ?(%d*)$')
  if not its_attempt then return nil end
  if its_channel ~= '' then -- an entry may have been written by hand
    local word = string.find(its_channel, 'wake:', -38, true)
    if not word or not string.find(its_channel, '^%x+~?$', word + 5) then return nil end
  end
  return its_attempt, its_kind, tonumber(ms), its_channel, its_owner, its_depth
end

-- A waiter that was seen within its claim is taken to be alive. It was seen when it queued; later
-- polls leave a mark.
local function is_alive(its_attempt, its_place, ms)
  if its_place < 0 then its_place = its_place + 2^52 end
  if math.abs(time - its_place) < ms * 1000 then return true end -- also if the clock was set back a little
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'seen ' .. its_attempt)) or 0) > 2^52 + time
end
