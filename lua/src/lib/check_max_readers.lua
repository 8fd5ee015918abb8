local reader_limit = 10000
if max_readers and max_readers ~= '' then
  reader_limit = #max_readers <= 6 and string.find(max_readers, '^[1-9]%d*$') and tonumber(max_readers)
  if not reader_limit or reader_limit > 100000 then return -5 end
end
