-- quorum/downgrade.lua: go from writing to reading on one node, without an instant between.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the last fencing token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     as in acquire
-- ARGV[2]  attempt   as in acquire: which hold to change
-- ARGV[3]  ttl_ms    integer, at least 1; counted from now
-- ARGV[4]  floor     a token that is handed over must be larger than this
--
-- Returns  time    it reads, for at least ttl_ms from now, under the token that it had; the
--                  server's clock in microseconds
--          0       lost: over, released, or another owner's; nothing is changed
--          -2      lost: the key holds something that is not a read-write lock
--
-- If the owner has no other hold to write, all waiting readers are admitted. Delivered twice, it
-- changes once, and lasts longer by as little as the deliveries are apart.
local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ''
-- The longest lease, which must have ended before a node is admitted.
if KEYS[4] and ttl_ms > tonumber(redis.call('HGET', KEYS[4], 'ttl') or 0) then
  redis.call('HSET', KEYS[4], 'ttl', ttl_ms)
end

--@include downgrade
