-- wrk: POSTs of a chat request, padded to `bytes` (the first argument behind --).
-- luacheck: globals init wrk
local wrk = wrk

function init(args)
  local head = '{"model":"bench","stream":false,"messages":[{"role":"user","content":"'
  local tail = '"}]}'
  local bytes = tonumber(args[1]) or 1024
  wrk.method = "POST"
  wrk.path = "/v1/chat/completions"
  wrk.headers["Content-Type"] = "application/json"
  wrk.body = head .. string.rep("x", bytes - #head - #tail) .. tail
end
