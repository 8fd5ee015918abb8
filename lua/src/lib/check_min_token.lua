local minimum = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (string.find(min_token, '^%d+$') and minimum < 2^52) then return -5 end
