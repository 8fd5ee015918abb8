-- Once per attempt: a second delivery gets the first answer, and changes nothing.
-- DEL comes first, since a full server refuses SET as the first write of a script, and must not keep a lock.
local function once(answer)
  if ended_ms > 0 then
    redis.call('DEL', KEYS[4])
    redis.call('SET', KEYS[4], answer, 'PX', ended_ms)
  end
  return answer
end
