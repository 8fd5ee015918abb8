-- luacheck lua: the scripts.
std = 'lua51'
read_globals = { 'ARGV', 'KEYS', 'redis' }
max_line_length = 100
ignore = { '431' } -- a parameter may have the name of what it is given
