-- This attempt was ended, as far as that is remembered.
if (tonumber(redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt)) or 0) > 2^52 + time then return -1 end
