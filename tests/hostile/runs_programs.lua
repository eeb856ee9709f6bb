-- expect: refused run
-- Starts a program. Must be refused: there is no os.execute.
os.execute("true") -- here
return { api = 1 }
