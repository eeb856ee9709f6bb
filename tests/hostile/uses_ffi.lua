-- expect: refused run
-- Asks for ffi, which reaches all memory. Must be refused: policies may require perilune.* and
-- files beside them.
local ffi = require "ffi" -- here
return { api = 1, name = ffi.os }
