-- expect: refused run
-- Replaces a method of all strings. Must be refused: libraries are frozen.
string.rep = nil
getmetatable("").__index = nil
return { api = 1 }
