// The page: asks /ui/state every two seconds while it is seen, hands it to the panels, and asks for the key.
// The key, the hour and the conversation are in this page's memory and nowhere else.

import { Chat } from "./chat.js";
import { byId, bytes, count, seconds, setText } from "./dom.js";
import { showAdapters, showDecisions, showMemory, showNotices, showPages, showRanks, showRequests, showTiles } from "./panels.js";
import { Plots } from "./plots.js";

const EVERY_MS = 2000, HOUR_S = 3600, MINUTE_S = 60, PATIENCE_MS = 10000;

let key = null;
let samples = [], newest = 0, server = null, before = null;
const plots = new Plots(byId("plots"));

// Addresses are relative to the page, which may lie behind a proxy's prefix.
const ask = (path, options = {}) =>
  fetch(path, { ...options, cache: "no-store", headers: { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) } });
const chat = new Chat(ask);

function say(status, text) {
  byId("status").dataset.status = status;
  setText(byId("status-text"), text);
}

async function look() {
  let answer;
  const since = newest;
  try {
    answer = await ask(`ui/state?since=${since}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const state = await answer.json();
    if (server !== null && server !== state.server.id) {
      // Another run of the server: its samples are numbered anew. Asked again once, since several may share an address.
      [samples, newest, before, server] = [[], 0, null, null];
      if (since > 0) return look();
    }
    show(state);
  } catch (error) {
    document.body.classList.add("stale");
    say("unreachable", answer ? String(error.message) : "not reachable; trying again");
  }
}

function show(state) {
  server = state.server.id;
  document.body.classList.remove("stale");
  byId("key-form").hidden = true;
  byId("board").hidden = false;

  const { fields, interval_s } = state.history;
  for (const row of state.history.samples) samples.push(Object.fromEntries(fields.map((name, place) => [name, row[place]])));
  newest = state.history.newest;
  samples = samples.filter((sample) => sample.time_s > state.time_s - HOUR_S);
  const recent = samples.filter((sample) => sample.time_s > state.time_s - MINUTE_S);
  const latest = (name) => recent.findLast((sample) => sample[name] !== null)?.[name];

  const { status, progress, uptime_s, restarts, version } = state.server;
  say(status, [status, progress, status === "ready" ? `up ${uptime_s < 60 ? `${Math.floor(uptime_s)} s` : seconds(uptime_s)}` : ""].filter(Boolean).join(" · "));
  showModel(state);
  showTiles(state, rates(state), latest);
  showNotices(state.notices);
  showMemory(state);
  showRanks(state.memory);
  showPages(state.memory, state.model);
  showRequests(state.requests);
  showAdapters(state.adapters);
  showDecisions(state.memory?.decisions ?? []);
  plots.show(samples, state.time_s, interval_s);
  chat.offer(state.model, state.adapters);
  setText(byId("footer"), `Holdfast ${version} · ${restarts} engine restarts · ${count(state.load.preemptions_total)} preemptions`);
}

function showModel({ model, memory }) {
  if (model === null) return setText(byId("model"), "no model yet");
  document.title = `${model.names[0]} · Holdfast`;
  const weights = memory?.terms.find((term) => term.term === "weights");
  setText(byId("model"), [model.names.join(", "), `${model.dtype} on ${model.device}`, weights ? bytes(weights.planned_bytes) : "",
    `${count(model.max_model_len)} tokens × ${count(model.max_num_seqs)} sequences`].filter(Boolean).join(" · "));
}

// Between two looks of this page; at the first, the server's last sample.
function rates(state) {
  const now = { at: performance.now(), prompt: state.load.prompt_tokens_total, generated: state.load.generation_tokens_total };
  const last = samples.at(-1);
  let found = { prompt: last?.prompt_tokens_per_s ?? 0, generated: last?.generation_tokens_per_s ?? 0 };
  if (before !== null) {
    const elapsed = (now.at - before.at) / 1000;
    found = { prompt: (now.prompt - before.prompt) / elapsed, generated: (now.generated - before.generated) / elapsed };
  }
  before = now;
  return found;
}

function askForKey() {
  const form = byId("key-form");
  setText(byId("key-problem"), key === null ? "" : "This key was refused.");
  say("locked", "needs a key");
  byId("board").hidden = true;
  if (form.hidden) {
    form.hidden = false;
    byId("key").focus();
  }
  key = null;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  look();
});

async function watch() {
  // A page that nobody sees asks nothing, and one that waits for a key has nothing to ask.
  if (!document.hidden && byId("key-form").hidden) await look();
  setTimeout(watch, EVERY_MS);
}
watch();
