-- expect: refused run
-- Asks for a file outside its own folder. Must be refused.
require "../unit/policy/secret" -- here
return { api = 1 }
