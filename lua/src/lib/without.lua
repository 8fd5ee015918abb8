local function without(attempts, one)
  local rest = {}
  for each in string.gmatch(attempts, '[^ ]+') do
    if each ~= one then rest[#rest + 1] = each end
  end
  return #rest > 0 and table.concat(rest, ' ') or nil
end
