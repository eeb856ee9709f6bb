-- expect: refused run
-- Allocates without end while it is loaded. The memory cap or the budget must stop it; the
-- process stays small.
local t = {}
for i = 1, math.huge do t[i] = { i } end
