-- rwlock/downgrade: turns a hold to write into one to read, in one step.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
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
-- If the owner has no other hold to write, all readers that wait are admitted. A second delivery
-- changes nothing, and the hold lasts longer by as little as the deliveries are apart.
local attempt, ttl_ms, owner, min_token, token_ttl_ms = unpack(ARGV)
--@include check_attempt
--@include check_ttl
--@include check_optional_owner
--@include check_min_token
--@include check_token_ttl

--@include find_hold

--@include downgrade
