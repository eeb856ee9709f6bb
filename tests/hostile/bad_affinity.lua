-- expect: refused check
-- Its affinity is neither "hard" nor "soft".
return { api = 1, name = "bad_affinity", affinity = "sticky", score = function() return 0 end }
