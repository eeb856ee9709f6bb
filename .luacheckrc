std = "luajit"
max_line_length = 120
ignore = { "581" } -- not (x >= y): that is how NaN is caught
files["tests/policy"] = { std = "+busted" }
exclude_files = { "lua/perilune/meta.lua", "tests/node_modules", "build*" }
