-- Returns the latest end of another owner's hold to read; the next millisecond if readers remain
-- unchecked; nil if there is none. Many readers are checked by a random sample, and its expired
-- ones are removed.
local function other_reader()
  local size = redis.call('HLEN', KEYS[1])
  local sample = redis.call('HRANDFIELD', KEYS[1], size > 512 and 32 or size, 'WITHVALUES')
  local expired, latest = {}, nil
  for i = 1, #sample, 2 do
    if string.sub(sample[i], 1, 5) == 'read:' then
      local ends = unexpired(sample[i + 1])
      if not ends then
        expired[#expired + 1] = sample[i]
      elseif sample[i] ~= 'read:' .. owner then
        latest = math.max(latest or 0, ends)
      end
    end
  end
  if expired[1] then
    redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(expired)))
  end
  if latest or size > 512 then return latest or now + 1 end
  local reads = redis.call('HEXISTS', KEYS[1], 'read:' .. owner)
  if reads == 0 then redis.call('HDEL', KEYS[1], 'readers') else redis.call('HSET', KEYS[1], 'readers', 1) end
end
