--@include clock_ms

--@include limit_min_token

--@include next_token

--@include to_token

--@include new_read_token

--@include read_state

--@include holds

--@include keep_until

--@include waiter

--@include notify

--@include first_writer

--@include admit_waiters

--@include expand_sole_hold

--@include delete_if_free

--@include remember
