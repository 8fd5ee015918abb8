--@include clock_ms
--@include to_token
local waiting = redis.pcall('ZCOUNT', KEYS[3], '-inf', '(4503599627370496')
if type(waiting) == 'table' then waiting = 0 end
local token = redis.pcall('GET', KEYS[2])
if type(token) ~= 'string' or not to_token(token) then token = '0' end
