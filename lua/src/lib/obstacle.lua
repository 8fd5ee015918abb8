-- What keeps a node from accepting: a token as large or larger. An attempt may propose its own again.
local mends = string.byte(floor) == 126 -- "~"
local function obstacle(again)
  local highest = proposed and largest() or -1
  if proposed and (proposed < highest or proposed == highest and not (again or mends)) then return highest end
end
