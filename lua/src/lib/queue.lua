local function queue(queued_at)
  if waiter == '' then return end
  redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', queued_at), waiter)
  redis.call('PEXPIRE', KEYS[3], 60000)
end
