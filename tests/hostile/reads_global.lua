-- expect: refused run
-- Reads a global that does not exist. Must be refused with the name and the line marked "here".
local x = prompt_tokens -- here
return { api = 1, params = { x = x } }
