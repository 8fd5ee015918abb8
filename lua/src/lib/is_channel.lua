-- A channel is `<prefix>wake:<32 digits>`, with "~" at the end in a cluster. Scripts publish to
-- no other one: a release publishes with the rights of its own user, for whatever was queued.
local function is_channel(text)
  return #text >= 37 and string.find(text, '^wake:%x+$', -37)
    or #text >= 38 and string.find(text, '^wake:%x+~$', -38)
end
