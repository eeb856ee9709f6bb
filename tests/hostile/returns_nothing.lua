-- expect: refused check
-- Forgets to return its table. Must be refused.
local policy = { api = 1 }
function policy.score() return 0 end
