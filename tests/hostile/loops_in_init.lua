-- expect: refused init
-- Never comes back from init. The instruction budget must stop it.
local policy = { api = 1 }
function policy.init() repeat local x = 1 until x == 2 end
return policy
