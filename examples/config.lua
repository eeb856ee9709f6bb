-- A router in front of two engines: perilune serve examples/config.lua
-- `perilune serve --help-config` prints every key with its default.
return {
    listen = "127.0.0.1:8000",
    admin = { listen = "127.0.0.1:8001" }, -- a token is needed when this is not loopback

    engines = {
        "http://127.0.0.1:30000", -- name, kind and models are asked of the engine
        { name = "big", url = "http://127.0.0.1:30001", max_inflight = 64, weight = 2 },
    },

    policy = { name = "prefix_seconds" }, -- ready-made; or { file = "mine.lua", params = { ... } }, beside this file

    -- Clients with a key; each key stands for a tenant. Without keys nobody is asked.
    -- api_keys = { { key = env("TEAM_A_KEY"), tenant = "team-a" } },

    -- Several routers in front of the same engines share their sessions; engines need the same names on all.
    -- sessions = { store = "redis", redis = { url = "redis://10.0.0.5:6379", password = env("REDIS_PASSWORD") } },

    timeouts = { first_byte_seconds = 300 },
}
