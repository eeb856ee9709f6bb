-- expect: refused run
-- Opens a file. Must be refused: there is no io.
local f = io.open("/etc/hostname") -- here
return { api = 1, name = f:read("l") }
