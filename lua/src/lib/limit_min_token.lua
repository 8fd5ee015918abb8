-- A mistake of another client must not keep a lock from being released.
if least and least > time + 86400000000 then least = nil end
