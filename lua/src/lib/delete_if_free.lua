-- A lock without holds has no key.
local function delete_if_free()
  local left = redis.call('HMGET', KEYS[1], 'mode', 'write', 'readers')
  if left[1] == 'several' and not left[2] and (tonumber(left[3]) or 0) <= 0 then redis.call('DEL', KEYS[1]) end
end
