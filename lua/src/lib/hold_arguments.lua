local owner, attempt, ttl_ms, floor, waiter = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[6] or ''
local hold_of = owner .. ' ' .. attempt
if not (ttl_ms and ttl_ms >= 1 and ttl_ms < 2^53 and ttl_ms % 1 == 0 and string.find(hold_of, '^%S+ %S+$')) then
  return -5
end
