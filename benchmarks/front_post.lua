-- wrk: the same POST again and again; every answer is read whole and its events are counted, one by one.
-- wrk -s front_post.lua URL -- BODY: prints answers, answers that were not 200, and events that carry a token.

local threads = {}
function setup(thread) table.insert(threads, thread) end

function init(arguments)
  wrk.method, wrk.body = "POST", arguments[1]
  wrk.headers["Content-Type"] = "application/json"
  answers, refused, events = 0, 0, 0
end

function response(status, headers, body)
  answers = answers + 1
  if status ~= 200 then refused = refused + 1 end
  -- A token's event names its finish_reason; of a chat's first event, which has the role, the content is "". llama-server
  -- ends with one that has no content.
  for choice in string.gmatch(body, "data: (%b{})\n") do
    if string.find(choice, '"finish_reason"', 1, true) and not string.find(choice, '"role"', 1, true)
      and not string.find(choice, '"delta":{}', 1, true) then
      events = events + 1
    end
  end
end

function done(summary, latency, requests)
  local answers, refused, events = 0, 0, 0
  for _, thread in ipairs(threads) do
    answers = answers + thread:get("answers")
    refused = refused + thread:get("refused")
    events = events + thread:get("events")
  end
  io.write(string.format("COUNTED %d %d %d %d %d\n", answers, refused, events, summary.duration, summary.bytes))
end
