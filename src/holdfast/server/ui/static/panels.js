// What the state of a server looks like, panel by panel. Asks nobody; page.js hands it each new state.

import { byId, bytes, count, drawn, element, fill, percent, seconds, setText } from "./dom.js";

const CELLS = 480;
const ABOUT = {
  weights: "the model", kv_pool: "keys and values of tokens", activations: "buffers of a step", logits: "sampling",
  buffers: "ids and tables", framework: "Python and torch", libraries: "pages of libraries", front: "HTTP and text",
  grammars: "structured output", scratch: "one copied matrix", graphs: "CUDA graphs",
  given_back: "returned between steps", unaccounted: "beyond all terms",
};
const ORDER = Object.keys(ABOUT);

export function showTiles(state, rates, latest) {
  const { load, memory } = state;
  const kv = memory?.kv;
  const tiles = [
    ["running", count(load.running)], ["waiting", count(load.waiting)],
    ["generated tokens/s", count(rates.generated)], ["prompt tokens/s", count(rates.prompt)],
    ["first token", seconds(latest("ttft_p50_s"))], ["between tokens", seconds(latest("inter_token_p50_s"))],
    ["KV pages", percent(kv && kv.blocks ? kv.blocks_used / kv.blocks : null)],
    ["prefix hits", percent(load.prefix_hit_share)],
  ];
  fill(byId("tiles"), tiles, () => element("li", {}, element("span"), element("b")), (tile, [name, value]) => {
    setText(tile.firstChild, name);
    setText(tile.lastChild, value);
  });
}

export function showNotices(notices) {
  byId("notices").hidden = notices.length === 0;
  fill(byId("notice-list"), notices, () => element("li", {}, element("strong"), element("span"), element("code")), (item, notice) => {
    item.className = `card ${notice.level}`;
    const when = notice.time_s === null ? "" : ` ${new Date(notice.time_s * 1000).toLocaleTimeString()} `;
    setText(item.children[0], notice.level);
    setText(item.children[1], `${when} ${notice.text}`);
    setText(item.children[2], notice.fix ?? "");
    item.children[2].hidden = !notice.fix;
  });
}

// Tiers that the engine has planned, then what else the machine has.
function tiersOf({ memory, machine }) {
  const here = (tier) => machine.find((one) => one.tier === tier && one.ours);
  const planned = (memory?.tiers ?? []).map((tier) => ({
    ...tier, name: here(tier.tier)?.name ?? tier.tier.toUpperCase(), now: here(tier.tier),
    terms: memory.terms.filter((term) => term.tier === tier.tier),
  }));
  const others = machine.filter((one) => !planned.some((tier) => tier.now === one)).map((one) => ({
    tier: one.tier, name: one.name, now: one, total_bytes: one.total_bytes, terms: [], budget_bytes: null,
    measured_bytes: one.tier === "ram" ? (memory?.processes ?? []).reduce((sum, process) => sum + process.resident_bytes, 0) : 0,
  }));
  return [...planned, ...others];
}

export function showMemory(state) {
  fill(byId("tiers"), tiersOf(state), makeTier, updateTier);
}

// What each of several processes that compute the model together has; those of other machines too.
export function showRanks(memory) {
  const ranks = memory?.ranks ?? [];
  byId("ranks").hidden = ranks.length === 0;
  const nodes = 1 + Math.max(0, ...ranks.map((rank) => rank.node));
  setText(byId("ranks-text"), nodes > 1 ? `on ${nodes} nodes; Memory is that of node 0, which serves this page` : "of this machine");
  fill(byId("rank-rows"), ranks, () => element("tr", {}, ...Array.from({ length: 9 }, () => element("td"))), (row, rank) => {
    const layers = rank.layers ? `${rank.first_layer} to ${rank.first_layer + rank.layers - 1}` : "all";
    const values = [rank.node, rank.rank, rank.pid, layers, rank.heads, rank.kv_heads, bytes(rank.weights_bytes),
      bytes(rank.kv_pool_bytes), rank.threads];
    values.forEach((value, place) => setText(row.children[place], `${value}`));
  });
}

function makeTier() {
  const row = (name) => element("div", { class: "row" }, element("span", { class: "quiet" }, name), element("div", { class: "bar", role: "img" }));
  const table = (...names) => element("table", {},
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))), element("tbody"));
  return element("div", { class: "tier" }, element("h3"), element("p", { class: "quiet" }), row("device"), row("planned"), row("measured"),
    element("ul", { class: "legend" }), element("details", {}, element("summary", {}, "Terms, and who holds the rest"),
      element("div", { class: "tables" }, table("this server", "planned", "measured"), table("the rest", "", "now"))));
}

function updateTier(view, tier) {
  const [title, text, device, planned, measured, legend, details] = view.children;
  const total = tier.now?.total_bytes ?? tier.total_bytes, held = tier.measured_bytes;
  const free = tier.now?.free_bytes ?? null;
  const others = free === null ? null : Math.max(0, total - free - held);
  const holders = tier.now?.holders ?? [];
  const terms = [...tier.terms].sort((a, b) => ORDER.indexOf(a.term) - ORDER.indexOf(b.term));
  const sum = terms.reduce((all, term) => all + term.planned_bytes, 0);
  setText(title, tier.name);
  setText(text, `${bytes(held)} held by this server` +
    (terms.length ? `, ${bytes(sum)} planned, of a budget of ${bytes(tier.budget_bytes)}` : "") +
    (free === null ? "" : `; others hold ${bytes(others)}, ${bytes(free)} of ${bytes(total)} are free`));

  const named = holders.reduce((all, holder) => all + (holder.held_bytes ?? 0), 0);
  const rest = others === null ? [] : named > others ? [["others", others]]
    : [...holders.map((holder) => ["others", holder.held_bytes ?? 0, holder.name]), ["others", others - named, "all others"]];
  bar(device.lastChild, "now", total, [["held", held, "this server"], ["promised", Math.max(0, sum - held), "planned and not taken yet"], ...rest], tier.budget_bytes);
  planned.hidden = measured.hidden = terms.length === 0;
  const longest = Math.max(sum, held);
  bar(planned.lastChild, "planned", longest, terms.map((term) => [term.term, term.planned_bytes]), null);
  bar(measured.lastChild, "measured", longest, scaled(terms, held), null);

  const chips = [...terms.filter((term) => term.measured_bytes > 0).map((term) => [term.term, term.measured_bytes]),
    ...(others === null ? [] : [["others", others], ["free", free]])];
  fill(legend, chips, () => element("li", {}, element("span", { class: "swatch", "aria-hidden": "true" }), element("span"), element("b")),
    (chip, [term, size]) => {
      chip.firstChild.className = `swatch term-${known(term)}`;
      setText(chip.children[1], `${term} `);
      setText(chip.children[2], bytes(size));
    });

  const [ours, theirs] = details.querySelectorAll("tbody");
  ours.parentNode.hidden = terms.length === 0;
  fill(ours, terms.map((term) => [term.term, term.term, ABOUT[term.term] ?? "", bytes(term.planned_bytes), bytes(term.measured_bytes)]), makeTermRow, updateTermRow);
  fill(theirs, [...holders.map((holder) => ["others", holder.name, `pid ${holder.pid}`, "", bytes(holder.held_bytes)]),
    ...(free === null ? [] : [["others", "in all", "with the system", "", bytes(others)], ["free", "free", "", "", bytes(free)]])], makeTermRow, updateTermRow);
}

const makeTermRow = () => element("tr", {},
  element("th", { scope: "row" }, element("span", { class: "swatch", "aria-hidden": "true" }), element("span"), element("span", { class: "quiet" })),
  element("td"), element("td"));

function updateTermRow(row, [term, name, about, ...numbers]) {
  row.firstChild.firstChild.className = `swatch term-${known(term)}`;
  setText(row.firstChild.children[1], name);
  setText(row.firstChild.children[2], about);
  numbers.forEach((number, place) => setText(row.children[place + 1], number));
}

const known = (term) => ([...ORDER, "others", "free", "held", "promised"].includes(term) ? term : "unaccounted");

// Terms that are subtracted have no length: the others are drawn as long as what the processes hold.
function scaled(terms, held) {
  const shown = terms.map((term) => [term.term, Math.max(0, term.measured_bytes ?? 0)]);
  const sum = shown.reduce((total, [, size]) => total + size, 0);
  return shown.map(([name, size]) => [name, sum > held && sum > 0 ? (size * held) / sum : size]);
}

// `parts`: term, bytes, and what to call it where that is something else.
function bar(view, kind, total, parts, budget) {
  const seen = parts.filter(([, size]) => size > 0);
  fill(view, budget === null ? seen : [...seen, ["budget", budget]], () => element("span"), (part, [term, size, name]) => {
    const marks = term === "budget";
    part.className = marks ? "budget" : `term-${known(term)}`;
    part.style.width = marks ? "" : `${(100 * size) / total}%`;
    part.style.left = marks ? `${Math.min(100, (100 * size) / total)}%` : "";
    part.title = `${name ?? term}: ${bytes(size)}`;
  });
  view.setAttribute("aria-label", `${kind}: ${seen.map(([term, size, name]) => `${name ?? term} ${bytes(size)}`).join(", ")}`);
}

// One cell stands for one page, or for equally many where there are more pages than cells.
export function showPages(memory, model) {
  const map = byId("kv-map"), kv = memory?.kv;
  if (!kv?.blocks) return setText(byId("kv-text"), "none");
  const cells = Math.min(CELLS, kv.blocks), columns = Math.min(60, cells), each = kv.blocks / cells;
  const touched = Math.max(kv.blocks_touched, kv.blocks_used);
  map.setAttribute("viewBox", `0 0 ${columns} ${Math.ceil(cells / columns)}`);
  map.style.aspectRatio = `${columns} / ${Math.ceil(cells / columns)}`;
  fill(map, [...Array(cells).keys()], () => drawn("rect", { width: 0.84, height: 0.84, rx: 0.12 }), (cell, place) => {
    const kind = place * each < kv.blocks_used ? "used" : place * each < touched ? "touched" : "untouched";
    if (cell.getAttribute("class") === kind && cell.hasAttribute("x")) return;
    cell.setAttribute("class", kind);
    cell.setAttribute("x", (place % columns) + 0.08);
    cell.setAttribute("y", Math.floor(place / columns) + 0.08);
  });
  const tokens = model ? `, ${model.block_size} tokens and ${bytes(kv.page_bytes)} each` : "";
  const text = `${count(kv.blocks_used)} in use, ${count(touched - kv.blocks_used)} idle (their content may be found again), ` +
    `${count(kv.blocks - touched)} never used, of ${count(kv.blocks)} pages${tokens}`;
  setText(byId("kv-text"), text);
  map.setAttribute("aria-label", text);
}

export function showRequests({ open, shown }) {
  byId("requests-scroll").hidden = open === 0;
  setText(byId("requests-text"), open === 0 ? "none" : shown.length < open ? `the oldest ${shown.length} of ${count(open)}` : `${count(open)} open`);
  fill(byId("request-rows"), shown, () => element("tr", {}, ...Array.from({ length: 9 }, () => element("td"))), (row, request) => {
    const answers = request.answers > 1 ? ` ×${request.answers}` : "";
    const values = [request.id, request.model, request.state + answers, seconds(request.age_s), count(request.prompt_tokens),
      count(request.cached_tokens), `${count(request.generated_tokens)} / ${count(request.max_tokens)}`,
      seconds(request.ttft_s), count(request.tokens_per_s)];
    values.forEach((value, place) => setText(row.children[place], value));
    row.children[2].className = request.state;
    row.children[0].title = request.id;
  });
}

export function showAdapters(adapters) {
  byId("adapters").hidden = adapters.length === 0;
  fill(byId("adapter-list"), adapters, () => element("li", {}, element("b"), element("span", { class: "quiet" })), (item, adapter) => {
    setText(item.firstChild, adapter.name);
    const now = adapter.running ? "running" : adapter.waiting ? "waiting" : "idle";
    setText(item.lastChild, ` ${now}${adapter.base && `, of ${adapter.base}`}`);
  });
}

export function showDecisions(decisions) {
  setText(byId("decision-count"), decisions.length ? `${decisions.length}` : "none yet");
  fill(byId("decision-list"), decisions, () => element("li", {}, element("b"), element("span")), (item, line) => {
    const cut = line.indexOf(" = ");
    setText(item.firstChild, cut < 0 ? "" : line.slice(0, cut));
    setText(item.lastChild, cut < 0 ? line : ` = ${line.slice(cut + 3)}`);
  });
}
