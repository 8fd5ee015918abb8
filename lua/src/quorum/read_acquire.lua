-- quorum/read_acquire.lua: read on one node of a quorum, read once more, or queue to read.
--
-- KEYS[1]  lock      hash: "write" and "read:owner" -> end and attempts of a hold; see README.md
-- KEYS[2]  fence     string: the largest accepted token; ttl one day, then anew from the clock
-- KEYS[3]  waiters   zset: waiter -> microsecond of queueing, less 2^52 for readers; ttl one minute
-- KEYS[4]  ended     string: exists once this attempt was ended
-- KEYS[5]  node      hash: the admission of this node of a guarded quorum; absent: no guard
-- ARGV[1]  owner     no white space; without one, send the attempt
-- ARGV[2]  attempt   fresh for every hold, the same in every delivery and every poll
-- ARGV[3]  ttl_ms    integer, at least 1
-- ARGV[4]  floor     "=N", "~N": the token is N or more; ">N": the same, also if the owner writes
--                    with an earlier one; N: a new token must be larger; empty: no token
-- ARGV[5]  limit     how many holds the owner may have to read
-- ARGV[6]  waiter    "attempt claim_ms owner channel" to queue if busy; absent, empty: do not queue
-- ARGV[7]  crowd     how many may read or wait at a time; absent: 10000
-- ARGV[8]  run       with KEYS[5]: the run id of this server
-- ARGV[9]  since     the place in the queue, a microsecond, the same on all nodes; absent: now
--
-- Returns  token          granted: the largest that this node knows, 0 without fencing; if it is
--                         more than the proposed one, propose it again, so that a majority knows it
--          {pttl, time}   busy: look again in pttl ms at most; the server's clock in microseconds
--          -1             refused: this attempt was ended
--          -2             refused: the key holds something that is not a read-write lock
--          -3             refused: the key holds something without a ttl
--          -4             refused: the owner has that many holds already
--          -5             refused: an argument is not what it must be
--          -7             refused: so many read or wait already
--          -9             refused: the node was not admitted since it started or lost its data
--
-- Busy: another owner writes, or waits to write. An owner that holds the lock does not wait for a
-- waiting writer.
-- Delivered twice, it grants once, and lasts longer by as little as the deliveries are apart.
--@include hold_arguments

--@include proposal

--@include restart_guard

--@include next_token

--@include readers_token

--@include largest_accepted

--@include accept

-- The proposed token or a larger one that the node knows: it is larger than those of all earlier
-- writers and, once a majority knows it, smaller than those of all later ones.
local function current_token()
  if floor == '' then return 0 end
  if not proposed then return readers_token() end
  return accept(math.max(proposed, largest()))
end

-- The common case: the lock is free, and nothing waits for it.
local keys = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])
if keys == 0 then
  local token = current_token()
  redis.call('HSET', KEYS[1], 'sole', 'read ' .. hold_of)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return token
end

--@include clock
local queued_at = tonumber(ARGV[9]) or time
--@include read_state

-- Only an owner that writes may take the token from the hash.
local function known_token(writes)
  if floor == '' then return 0 end
  local nested = writes and string.byte(floor) ~= 62 -- ">"
  if nested and state[5] then return tonumber(state[5]) end
  if not state[5] or proposed and not writes then return current_token() end
  local token = proposed and current_token() or readers_token(state[5])
  if token ~= tonumber(state[5]) then redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', token)) end
  return token
end

--@include read_or_queue
