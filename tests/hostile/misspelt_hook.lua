-- expect: refused check
-- `scores` is no hook. Must be refused, naming the member: otherwise it would silently never
-- run.
return { api = 1, scores = function() return 0 end }
