local function grant(its_attempt, _, _, ms)
  redis.call('SET', KEYS[1], its_attempt, 'PX', ms)
end
