local most = 10000
if max_readers and max_readers ~= '' then
  most = tonumber(max_readers)
  if not (most and most >= 1 and most <= 1000000 and most % 1 == 0) then return -5 end
end
