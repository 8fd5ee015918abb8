-- Whether this attempt was ended, as far as that is remembered.
local function is_ended()
  return (tonumber(redis.call('ZSCORE', KEYS[3], 'ended ' .. attempt)) or 0) > 2^52 + time
end
