local function without(attempts, one)
  local rest = {}
  for each in string.gmatch(attempts, '%S+') do
    if each ~= one then rest[#rest + 1] = each end
  end
  return table.concat(rest, ' '), #rest
end
