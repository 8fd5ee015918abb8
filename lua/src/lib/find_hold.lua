--@include clock_ms

--@include limit_min_token

--@include next_token

--@include to_token

--@include new_read_token

--@include read_state

--@include holds

--@include without

--@include keep_until

--@include waiter

--@include notify

--@include first_writer

--@include admit_waiters

--@include expand_sole_hold

if read_state() then return -2 end
expand_sole_hold()
local ends = now + tonumber(ttl_ms)
local write_ends, write = unexpired(state.write)
local writer, writes = string.match(write or '', '^([^ ]+) (.+)$')
local read_ends, reads = unexpired(state.read)
local is_reading, is_writing = reads and has(reads, attempt), writer == owner and has(writes, attempt)
if not is_reading and not is_writing then return 0 end
