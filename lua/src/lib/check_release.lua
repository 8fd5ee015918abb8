-- Every argument is checked on every path, before the first write.
--@include check_attempt
--@include check_min_token
--@include check_waiter
--@include check_token_ttl
if remember == '' then remember = nil end
if remember and remember ~= '1' then return -5 end
