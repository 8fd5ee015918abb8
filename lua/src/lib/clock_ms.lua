--@include clock
local now = math.floor(time / 1000)
