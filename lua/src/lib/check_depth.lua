local depth = 255
if max_depth and max_depth ~= '' then
  depth = tonumber(max_depth)
  if not (depth and depth >= 1 and depth <= 65535 and depth % 1 == 0) then return -5 end
end
