-- The server chooses the token. (The scripts of a quorum have these functions in proposals.lua:
-- there, the client does.)

-- Also if the lock is busy: a release would grant it with a smaller token.
if least and least > time + 86400000000 then return -5 end

-- The token of a new lease, or nil and a refusal. `new_token` was made for a waiter that is dead.
local function take_token(new_token)
  if not min_token then return 0 end
  if new_token then return new_token end
  return next_token()
end

-- The token of a hold beside or inside another one of its owner: that of the other one, if it has
-- one.
local function hold_token(current)
  if not min_token then return 0 end
  if (tonumber(current) or 0) > 0 then return tonumber(current) end
  return next_token()
end
