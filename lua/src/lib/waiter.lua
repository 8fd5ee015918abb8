--@include is_channel

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
