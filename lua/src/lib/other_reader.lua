-- Removes readers whose time is over, some hundred at most, going on where the last look stopped, until it finds
-- others than the owner who still read: when those found will be over, or at once if there is more to look at.
-- Nil: there is none, since all were seen in this look, or all that were counted are gone.
local function other_reader()
  local reads = live(redis.call('HGET', KEYS[1], 'read:' .. owner)) and 1 or 0
  local began = redis.call('HGET', KEYS[1], 'sweep') or '0'
  local cursor, pages, latest = began, 0, nil
  local left = tonumber(redis.call('HGET', KEYS[1], 'readers')) or 0
  repeat
    local page, over = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', pages == 0 and 16 or 256), {}
    if page[1] == '0' or pages == 2 then redis.call('HDEL', KEYS[1], 'sweep') end
    cursor, pages = page[1], pages + 1
    for i = 1, #page[2], 2 do
      local field, ends = page[2][i], live(page[2][i + 1])
      if string.sub(field, 1, 5) == 'read:' then
        if not ends then
          over[#over + 1] = field
        elseif field ~= 'read:' .. owner then
          latest = math.max(latest or 0, ends)
        end
      end
    end
    if over[1] then left = redis.call('HINCRBY', KEYS[1], 'readers', -redis.call('HDEL', KEYS[1], unpack(over))) end
  until latest or cursor == '0' or pages == 3
  if latest then return latest end
  if left > reads and not (began == '0' and cursor == '0') then
    if cursor ~= '0' then redis.call('HSET', KEYS[1], 'sweep', cursor) end
    return now + 1
  end
  if reads == 0 then redis.call('HDEL', KEYS[1], 'readers') else redis.call('HSET', KEYS[1], 'readers', 1) end
end
