-- The server chooses the token. (The scripts of a quorum have these functions in
-- proposed_token.lua: there, the client does.)

-- The token of a new lease, or nil and a refusal. `new_token` was made for a waiter that is dead.
local function take_token(new_token)
  if not min_token then return 0 end
  if new_token then return new_token end
  return next_token()
end

-- The token of a hold beside or inside another one of its owner: that of the other one, if it has
-- one. That of a mutex is the last one.
local function hold_token(current)
  if not min_token then return 0 end
  if kind == 'mutex' then current = to_token(redis.call('GET', KEYS[2])) end
  if (current or 0) > 0 then return current end
  return next_token()
end
