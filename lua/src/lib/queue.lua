local function queue()
  if waiter == '' then return end
  redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', tonumber(ARGV[9]) or time), waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
end
