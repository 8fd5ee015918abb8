-- Also if the lock is busy: a release would grant it with a smaller token.
if least and least > time + 86400000000 then return -5 end
