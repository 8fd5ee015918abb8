-- luacheck lua: the sources of the scripts, and the scripts that are generated from them.
std = 'lua51'
read_globals = { 'ARGV', 'redis' }
globals = { 'KEYS' } -- a script for many locks lets KEYS be the keys of one lock after another
max_line_length = 120

-- A script includes whole fragments: also names that it does not use, or that it uses again.
ignore = { '211/count', '211/has', '211/kind', '211/now', '231/no_token', '431' }

-- In a source, names come from the fragments that it includes, and are used there. Its script shows
-- mistakes in them.
files['lua/src'] = { ignore = { '11.', '211', '231', '241', '311', '542' } }
