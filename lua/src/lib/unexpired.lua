-- "end word...": the end in ms and the words, or nil once it is over.
local function live(hold)
  local ends, words = string.match(hold or '', '^(%d+) (.+)$')
  if ends and tonumber(ends) > now then return tonumber(ends), words end
end
