-- expect: refused run
-- Catches the error that the instruction budget raises, for ever. Must be stopped all the
-- same.
local function spin() while true do end end
while true do pcall(spin) end
