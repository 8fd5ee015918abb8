local depth = 255
if max_depth and max_depth ~= '' then
  depth = #max_depth <= 4 and string.find(max_depth, '^[1-9]%d*$') and tonumber(max_depth)
  if not depth or depth > 1024 then return -5 end
end
