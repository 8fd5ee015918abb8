-- mutex/renew_many: generated from its source in lua/src, do not edit.
-- mutex/renew_many: extends those of many leases that their attempts still have.
--
-- KEYS[1]  lock      string: the attempt that holds the mutex, with a TTL. Then the key of the next
--                    lock, for at most 128 locks
-- ARGV[1]  ttl_ms    as in renew, for all locks
-- ARGV[2]  attempt   as in acquire. Then that of the next lock
--
-- Returns  {answer...}   for each lock the server's clock in microseconds: held for ttl_ms from
--                        now; or -10: nothing was changed, send renew for this lock
--          -5            refused: an argument is malformed
--
-- A second delivery extends the leases again, by as little as the deliveries are apart.
local ttl_ms = ARGV[1]
if not ttl_ms or #ttl_ms > 10 or not string.find(ttl_ms, '^[1-9]%d*$') then return -5 end
local count = #KEYS
local arguments = 1 + count
if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
for i = 1, count do
  local attempt = ARGV[1 + i]
  if not attempt or attempt == '' or #attempt > 128 or string.find(attempt, ' ', 1, true) then return -5 end
end
local clock = redis.call('TIME')
local time = clock[1] * 1000000 + clock[2]
local answers = {}
for i = 1, count do
  answers[i] = -10
  if redis.pcall('GET', KEYS[i]) == ARGV[1 + i] then
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
    answers[i] = time
  end
end
return answers
