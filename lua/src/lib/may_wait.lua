-- Whether one of the locks has a queue, so that something may wait for it: one call for all of them
-- takes less time than one for each.
local queues = {}
for i = 2, #keys, 2 do queues[#queues + 1] = keys[i] end
local may_wait = redis.call('EXISTS', unpack(queues)) > 0
