-- `mode` is a field of the hash that says its kind.
if not owner or owner == '' or owner == 'mode' or #owner > 256 or string.byte(owner) == 58
  or string.find(owner, ' ', 1, true) then
  return -5
end
