-- A mistake of another client must not keep a lock from being released.
if minimum and minimum > time + 86400000000 then minimum = nil end
