-- Whether no lock is held or has a queue: one call for all of them takes less time than one for
-- each. A lock may occur twice: the second time, its first attempt has it.
local are_free, companions, seen = true, {}, {}
for i = 1, #keys, 3 do
  are_free = are_free and not seen[keys[i]]
  seen[keys[i]] = true
  companions[#companions + 1], companions[#companions + 2] = keys[i], keys[i + 2]
end
are_free = are_free and redis.call('EXISTS', unpack(companions)) == 0
