--@include publish

-- Grants the free lock to the first waiter who can be told, for a claim that ends at a time of the same
-- clock that the message dates it by. Nil and a token if there is none.
-- PUBLISH answers how many heard it: 0 is a client that is gone, unless its channel ends in "~": then it listens to
-- another node of a cluster. An error is a denied channel.
local function hand_over()
  if redis.call('EXISTS', KEYS[3]) == 0 then return nil end
  local minted, token = pcall(next_token)
  if not minted then return nil end
  local now = redis.call('TIME')
  local time = now[1] * 1000000 + now[2]
  local news = string.format(' %.0f %.0f ', token, time) .. KEYS[1]
  for _ = 1, 64 do
    local waiting = redis.pcall('ZPOPMIN', KEYS[3])[1]
    if not waiting or waiting == waiter then return nil, token end
    local heir, claim_ms, its_owner, channel = string.match(waiting, '^(%S+) (%d%d?%d?%d?%d?) (%S+) ?(.*)$')
    claim_ms = tonumber(claim_ms) or 0
    if claim_ms > 0 then
      grant(its_owner, heir, math.floor(time / 1000) + claim_ms, token)
      if channel == '' or publish(channel, heir .. news) ~= 0 or string.sub(channel, -1) == '~' then
        return claim_ms
      end
    end
  end
  return nil, token
end
