local function count(attempts)
  return select(2, string.gsub(attempts, '%S+', ''))
end
