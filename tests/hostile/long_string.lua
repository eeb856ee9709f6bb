-- expect: refused run
-- One call that asks for two gigabytes. The memory cap must refuse it; the process stays
-- small.
local s = ("x"):rep(2 ^ 31 - 64)
return { api = 1, name = s }
