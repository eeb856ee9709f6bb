-- expect: refused check
-- A temperature below zero means nothing. Must be refused.
return { api = 1, temperature = -1, score = function() return 0 end }
