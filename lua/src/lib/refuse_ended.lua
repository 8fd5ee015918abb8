-- This attempt was ended, as far as that is remembered. The same call says what a poll must know:
-- its place, and when it was last seen.
local scores = redis.call('ZMSCORE', KEYS[3], 'ended ' .. attempt, waiter, 'seen ' .. attempt)
if (tonumber(scores[1]) or 0) > 2^52 + time then return -1 end
