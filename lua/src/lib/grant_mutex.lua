local function grant(waiter_attempt, _, _, ms)
  redis.call('SET', KEYS[1], waiter_attempt, 'PX', ms)
end
