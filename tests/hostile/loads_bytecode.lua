-- expect: refused run
-- Builds bytecode and loads it: forged bytecode crashes the VM. There is neither string.dump
-- nor load.
local f = load(string.dump(function() return 1 end))
return { api = 1, name = tostring(f()) }
