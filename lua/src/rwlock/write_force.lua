-- rwlock/write_force: revokes the holds of the writer.
--
-- KEYS[1]  lock           hash: the holds, and the field `mode`
-- KEYS[2]  fence          string: the last fencing token
-- KEYS[3]  waiters        zset: waiters by their places, and marks
-- ARGV[1]  attempt        up to 128 bytes, no space; new for every call, the same in each delivery
-- ARGV[2]  min_token      below 2^52: the token of the next waiter is larger than this; default: 0
-- ARGV[3]  token_ttl_ms   as in acquire; default: 3600000
-- ARGV[4]  only_from      an owner: revoke the lock from this one only; default: from any
--
-- Returns  n    revoked, with all n holds to write; waiters that may enter are admitted
--          0    there was no such writer
--          -2   refused: the key holds something else
--          -3   refused: the key has no TTL
--          -5   refused: an argument is malformed
--
-- Its owner keeps its holds to read. It learns of it from its next renewal or release. A second
-- delivery within a minute gets the first answer, and revokes nothing of the next writer.
local attempt, min_token, token_ttl_ms, only_from = unpack(ARGV)
local remember, owner = '1', ''
--@include check_force

--@include force_common

local refusal = read_state()
if refusal then return answer(refusal) end
expand_sole_hold()
local _, write = unexpired(state.write)
if not write or only_from and string.match(write, '^[^ ]+') ~= only_from then return answer(0) end
local number = answer(count(write) - 1)
--@include revoke_token
end_write()
admit_waiters()
delete_if_free()
return number
