-- expect: refused check
-- A parameter that is a table: parameters are numbers, strings or booleans. Must be refused,
-- naming it.
return { api = 1, params = { weights = { 1, 2 } }, score = function() return 0 end }
