-- expect: refused check
-- Written for a contract of the future. Must be refused, naming both versions.
return { api = 999, name = "wrong_api", score = function() return 0 end }
