local function own_token()
  return proposed and accept(proposed) or next_token()
end
