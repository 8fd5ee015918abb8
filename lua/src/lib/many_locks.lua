-- The fragments act on the keys of one lock at a time.
local keys, KEYS = KEYS, {}
