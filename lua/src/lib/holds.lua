-- A hold, `end word...`: the millisecond at which it ends, and the words; nothing once it has
-- expired.
local function unexpired(hold)
  local ends, words = string.match(hold or '', '^(%d+) (.+)$')
  if ends and tonumber(ends) > now then return tonumber(ends), words end
end

local function has(attempts, one)
  return string.find(' ' .. attempts .. ' ', ' ' .. one .. ' ', 1, true) ~= nil
end

local function count(attempts)
  return select(2, string.gsub(attempts, '[^ ]+', ''))
end
