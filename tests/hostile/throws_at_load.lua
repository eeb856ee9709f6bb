-- expect: refused run
-- Fails while the file runs. Must be refused with this file, the line marked "here" and the text.
local function helper() error("the moon is in the way") end -- here
helper()
return { api = 1 }
