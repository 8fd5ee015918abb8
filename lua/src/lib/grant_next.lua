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
