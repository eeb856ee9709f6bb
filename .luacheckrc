std = "luajit"
max_line_length = 100
files["tests/policy"] = { std = "+busted" }
files["tests/hostile"] = { ignore = { "" } } -- wrong on purpose
exclude_files = { "tests/node_modules", "build*" }
