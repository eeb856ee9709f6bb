-- expect: refused init
-- Fails in init. Must be refused with the line marked "here".
local policy = { api = 1 }
function policy.init() return nothing.at_all end -- here
return policy
