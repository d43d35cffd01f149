// Small plots of the last hour as SVG. Pointing at one, or its arrow keys, reads the values of a moment in all of them.

import { bytes, count, drawn, element, percent, seconds, setText } from "./dom.js";

const WIDTH = 320, HEIGHT = 96, HOUR_S = 3600, LEAST_S = 300;

const PLOTS = [
  { title: "Tokens per second", say: count,
    lines: { generated: "generation_tokens_per_s", prompt: "prompt_tokens_per_s" } },
  { title: "Requests", say: count, lines: { running: "running", waiting: "waiting" } },
  { title: "Time to first token", say: seconds, lines: { p50: "ttft_p50_s", p95: "ttft_p95_s" } },
  { title: "Between two tokens", say: seconds, lines: { p50: "inter_token_p50_s", p95: "inter_token_p95_s" } },
  { title: "Arrival to last token", say: seconds, lines: { p50: "e2e_p50_s", p95: "e2e_p95_s" } },
  { title: "Outputs ended", say: count, lines: { all: "ended", failed: "failed" } },
  { title: "KV pages in use", say: percent, top: 1, lines: { used: "kv_share" } },
  { title: "Memory held", say: bytes, lines: { held: "held_bytes" } },
];

export class Plots {
  constructor(parent) {
    this.views = PLOTS.map((plot) => this.view(plot));
    parent.append(...this.views.map((view) => view.figure));
    this.chosen = null;
  }

  view(plot) {
    const names = Object.keys(plot.lines);
    const paths = names.map((_, place) => drawn("path", { class: `line line${place}` }));
    const cursor = drawn("line", { class: "cursor", y1: 0, y2: HEIGHT });
    const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, preserveAspectRatio: "none" },
      drawn("line", { class: "grid", x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
      drawn("line", { class: "grid", x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), ...paths, cursor);
    const values = names.map(() => element("b"));
    const keys = names.map((name, place) => element("span", { class: `key key${place}` }, name, " ", values[place]));
    const most = element("span", { class: "quiet most" });
    const when = element("span", { class: "quiet" });
    const caption = element("figcaption", {}, element("strong", {}, plot.title), " ", when, element("span", { class: "keys" }, ...keys));
    const foot = element("p", { class: "axis quiet", "aria-hidden": "true" }, element("span"), element("span", {}, "now"));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.choose((event.clientX - box.left) / box.width);
    });
    svg.addEventListener("pointerleave", () => this.choose(null));
    svg.addEventListener("blur", () => this.choose(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -0.01, ArrowRight: 0.01, Home: -1, End: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.choose(Math.min(1, Math.max(0, (this.chosen ?? 1) + step)));
    });
    return { ...plot, figure: element("figure", {}, caption, element("div", { class: "frame" }, most, svg), foot),
      svg, paths, cursor, values, most, when, begin: foot.firstChild };
  }

  choose(share) {
    this.chosen = share;
    this.read();
  }

  // `samples`: objects with the server's names. `now_s`: by the server's clock.
  show(samples, now_s, interval_s) {
    this.samples = samples;
    this.now_s = now_s;
    this.interval_s = interval_s;
    // A server that has just begun has no hour yet.
    this.span_s = Math.min(HOUR_S, Math.max(LEAST_S, now_s - (samples[0]?.time_s ?? now_s)));
    for (const view of this.views) {
      const fields = Object.values(view.lines);
      const highest = samples.reduce((top, sample) => Math.max(top, ...fields.map((field) => sample[field] ?? 0)), 0);
      const top = view.top ?? (highest * 1.1 || 1);
      setText(view.most, highest || view.top ? view.say(view.top ?? highest) : "");
      view.most.style.top = `${100 * (1 - (view.top ?? highest) / top)}%`;
      setText(view.begin, `${seconds(this.span_s)} ago`);
      fields.forEach((field, place) => view.paths[place].setAttribute("d", this.path(field, top)));
    }
    this.read();
  }

  path(field, top) {
    let path = "", last = null;
    for (const sample of this.samples) {
      const value = sample[field];
      if (value === null) continue;
      const x = (WIDTH * (1 - (this.now_s - sample.time_s) / this.span_s)).toFixed(1);
      const y = ((HEIGHT - 2) * (1 - value / top) + 1).toFixed(1);
      // A time without any request is a gap; a lone value is a dot.
      const joined = last !== null && sample.time_s - last < 6 * this.interval_s;
      path += joined ? `L${x} ${y}` : `M${x} ${y}h0.1`;
      last = sample.time_s;
    }
    return path;
  }

  read() {
    if (!this.samples?.length) return;
    const wanted = this.chosen === null ? this.now_s : this.now_s - this.span_s * (1 - this.chosen);
    const sample = this.samples.reduce((best, one) => (Math.abs(one.time_s - wanted) < Math.abs(best.time_s - wanted) ? one : best));
    for (const view of this.views) {
      const said = Object.entries(view.lines).map(([name, field], place) => {
        setText(view.values[place], view.say(sample[field]));
        return `${name} ${view.say(sample[field])}`;
      });
      const ago = this.chosen === null ? "" : `${seconds(Math.max(0, this.now_s - sample.time_s))} ago`;
      setText(view.when, ago);
      view.svg.setAttribute("aria-label", `${view.title}: ${said.join(", ")}${ago && `, ${ago}`}`);
      const x = WIDTH * (1 - (this.now_s - sample.time_s) / this.span_s);
      for (const end of ["x1", "x2"]) view.cursor.setAttribute(end, x.toFixed(1));
      view.cursor.classList.toggle("seen", this.chosen !== null);
    }
  }
}
