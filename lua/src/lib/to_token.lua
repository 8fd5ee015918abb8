-- The number of a stored token: decimal digits, below 2^53. Nil for any other text: tonumber takes
-- 0x10, 1e3, inf and nan as well.
local function to_token(text)
  local token = text and string.find(text, '^%d+$') and tonumber(text)
  return token and token < 2^53 and token or nil
end
