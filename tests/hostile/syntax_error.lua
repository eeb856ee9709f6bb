-- expect: refused parse
-- A parenthesis is missing. Must be refused with this file and the line marked "here".
local policy = { api = 1, name = "syntax_error" }
function policy.score(req, w return 1 end -- here
return policy
