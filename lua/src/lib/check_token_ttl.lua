if not token_ttl_ms or token_ttl_ms == '' then
  token_ttl_ms = '3600000'
elseif #token_ttl_ms > 10 or not string.find(token_ttl_ms, '^[1-9]%d*$') then
  return -5
end
