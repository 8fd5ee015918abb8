if count < 1 or count > 128 or count % 1 > 0 or #ARGV ~= arguments then return -5 end
