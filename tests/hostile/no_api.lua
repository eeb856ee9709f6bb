-- expect: refused check
-- Does not say which contract it is written for. Must be refused.
return { name = "no_api", score = function() return 0 end }
