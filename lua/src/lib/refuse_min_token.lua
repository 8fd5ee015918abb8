-- A min_token that is too large is refused even if the lock is busy: a release would grant it with
-- a smaller token.
if minimum and minimum > time + 86400000000 then return -5 end
