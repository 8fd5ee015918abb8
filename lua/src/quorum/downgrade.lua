-- quorum/downgrade: turns a hold to write into one to read, on one node of a quorum.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the largest token that this node has accepted
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- KEYS[4]  node           hash: the admission of this node to a guarded quorum; default: no guard
-- ARGV[1]  attempt        as in acquire
-- ARGV[2]  ttl_ms         1 to 9999999999, counted from now
-- ARGV[3]  owner          as in acquire; default: the attempt
-- ARGV[4]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[5]  token_ttl_ms   as in acquire; default: 3600000
--
-- Returns  time   it reads, for at least ttl_ms from now, with the token that it had; the clock in
--                 microseconds
--          0      lost: expired, released, or another owner's
--          -2     lost: the key holds something else
--          -5     refused: an argument is malformed
--
-- The rest is as on one server: rwlock/downgrade.
local attempt, ttl_ms, owner, min_token, token_ttl_ms = unpack(ARGV)
--@include check_attempt
--@include check_ttl
--@include check_optional_owner
--@include check_min_token
--@include check_token_ttl

-- The longest lease, which the admission of a node waits for.
local longest = KEYS[4] and tonumber(redis.call('HGET', KEYS[4], 'ttl') or 0)

--@include find_hold

if longest and tonumber(ttl_ms) > longest then redis.call('HSET', KEYS[4], 'ttl', ttl_ms) end

--@include downgrade
