-- expect: refused check
-- Returns a function instead of a table. Must be refused: the message says what a policy
-- returns.
return function() return 0 end
