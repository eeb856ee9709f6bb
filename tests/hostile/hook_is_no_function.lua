-- expect: refused check
-- A hook that cannot be called. Must be refused, naming the hook.
return { api = 1, score = 42 }
