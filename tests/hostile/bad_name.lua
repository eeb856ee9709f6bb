-- expect: refused check
-- A name that could not stand in a header or a metric. Must be refused.
return { api = 1, name = "two\r\nlines: x", score = function() return 0 end }
