-- expect: refused run
-- Writes a global, most often a forgotten `local`. Must be refused with the name and the line marked
-- "here".
counter = 0 -- here
return { api = 1 }
