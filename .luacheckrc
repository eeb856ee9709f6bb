std = "luajit"
max_line_length = 100
files["tests/policy"] = { std = "+busted" }
exclude_files = { "lua/perilune/meta.lua", "tests/node_modules", "build*" }
