-- Every argument is checked on every path, before the first write.
--@include check_attempt
--@include check_min_token
--@include check_token_ttl
if only_from == '' then only_from = nil end
if only_from and (#only_from > 256 or string.byte(only_from) == 58 or string.find(only_from, ' ', 1, true)) then
  return -5
end
