if not owner or owner == '' then
  owner = attempt
elseif #owner > 256 or string.byte(owner) == 58 or string.find(owner, ' ', 1, true) then
  return -5
end
