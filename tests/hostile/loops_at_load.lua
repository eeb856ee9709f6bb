-- expect: refused run
-- Never comes back while it is loaded. The instruction budget must stop it.
while true do end
