local ttl_ms, token_ttl_ms = ARGV[1], ARGV[2]
--@include check_ttl
--@include check_token_ttl
local count = #KEYS / 3
local arguments = 2 + 3 * count
--@include check_count
local instant = redis.call('TIME')
local latest = (instant[1] + 86400) * 1000000
local owners = {}
for i = 1, count do
  local attempt, owner, proposal = ARGV[3 * i], ARGV[1 + 3 * i], ARGV[2 + 3 * i]
  --@include check_attempt
  --@include check_optional_owner
  --@include check_one_proposal
  owners[i] = owner
end

--@include many_locks

--@include accept_proposal
