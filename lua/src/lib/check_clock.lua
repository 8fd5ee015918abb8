if least and least > time + 86400000000 then return -5 end
