local least = tonumber(min_token)
if min_token == '' then min_token = nil end
if min_token and not (least and least >= 0 and least < 2^52 and least % 1 == 0) then return -5 end
