-- expect: refused run
-- Calls itself without end. Must be refused as a stack overflow, not crash.
local function f() return 1 + f() end
f()
