-- A proposed token belongs to the scripts for quorums.
if (string.byte(floor) or 0) > 57 then return -5 end
