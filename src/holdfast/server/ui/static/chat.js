// The chat box: streams an answer over fetch, and shows the log-probabilities of a token that is pointed at.

import { byId, count, element, seconds, setText } from "./dom.js";

const TOP = 5;
const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
const written = (token) => (token === "" ? "∅" : token.replaceAll("\n", "⏎").replaceAll(" ", "␣"));

export class Chat {
  constructor(ask) {
    this.ask = ask;
    this.messages = [];
    this.running = null;
    this.model = null;
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
      if (event.key === "Escape") this.running?.abort();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    const log = byId("messages");
    log.addEventListener("pointerover", (event) => this.point(event.target));
    log.addEventListener("pointerleave", () => this.point(null));
    log.addEventListener("keydown", (event) => this.step(event));
    log.addEventListener("focusout", () => this.point(null));
  }

  // Names that may be asked for; `model` is null before there is one.
  offer(model, adapters) {
    this.model = model;
    const select = byId("chat-model"), names = model === null ? [] : [model.names[0], ...adapters.map((adapter) => adapter.name)];
    if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
      const chosen = select.value;
      select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
      if (names.includes(chosen)) select.value = chosen;
    }
    byId("send").disabled = model === null || !model.can_generate || this.running !== null;
    setText(byId("chat-title"), model === null || model.can_chat ? "Chat" : "Completion");
    if (model !== null && !model.can_generate) setText(byId("chat-status"), "This model generates no text.");
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    byId("messages").replaceChildren();
    setText(byId("chat-status"), "");
    byId("prompt").focus();
  }

  body() {
    const logprobs = byId("logprobs").checked, most = Math.min(TOP, this.model.max_logprobs);
    const settings = {
      model: byId("chat-model").value, stream: true, stream_options: { include_usage: true },
      temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    };
    if (!this.model.can_chat) {
      return { ...settings, prompt: this.messages.map((message) => message.content).join(""), ...(logprobs ? { logprobs: most } : {}) };
    }
    const system = byId("system").value.trim();
    return { ...settings, messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      ...(logprobs ? { logprobs: true, top_logprobs: most } : {}) };
  }

  async send() {
    const text = byId("prompt").value;
    if (this.running !== null || this.model === null || !text.trim()) return;
    if (!byId("chat-form").reportValidity()) return;
    byId("prompt").value = "";
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    const answer = new Answer(this.add("assistant", ""));
    this.running = new AbortController();
    this.switch(true);
    setText(byId("chat-status"), "answering");
    try {
      const path = this.model.can_chat ? "v1/chat/completions" : "v1/completions";
      const response = await this.ask(path, {
        method: "POST", signal: this.running.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(this.body()),
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      await this.follow(response.body, answer);
    } catch (error) {
      answer.end(error.name === "AbortError" ? "stopped" : `failed: ${error.message}`, error.name !== "AbortError");
    }
    this.running = null;
    this.switch(false);
    if (answer.text) this.messages.push({ role: "assistant", content: answer.text });
    else this.messages.pop();
    setText(byId("chat-status"), answer.summary());
  }

  switch(busy) {
    byId("stop").hidden = !busy;
    byId("send").disabled = busy;
    byId("messages").setAttribute("aria-busy", busy);
  }

  async follow(stream, answer) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader(), log = byId("messages");
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the connection was lost");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      for (const event of events) {
        const data = event.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        if (event.startsWith("data:")) answer.take(JSON.parse(data));
      }
      if (atEnd) log.scrollTop = log.scrollHeight;
      setText(byId("chat-status"), answer.summary());
    }
  }

  add(role, text) {
    const made = element("article", { class: role, tabindex: role === "assistant" ? "0" : null, "aria-label": role },
      element("div", { class: "said" }, text), element("p", { class: "quiet" }));
    byId("messages").append(made);
    byId("messages").scrollTop = byId("messages").scrollHeight;
    return made;
  }

  // Arrow keys go from token to token of the answer that has the focus.
  step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tokens = [...event.target.querySelectorAll(".t")].filter((token) => token.logprobs);
    if (by === undefined || tokens.length === 0) return;
    event.preventDefault();
    const now = tokens.indexOf(this.pointed);
    this.point(tokens[Math.min(tokens.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : tokens.length - 1) : now + by))]);
  }

  point(token) {
    this.pointed?.classList.remove("pointed");
    const box = byId("token"), entries = token?.logprobs;
    this.pointed = entries ? token : null;
    box.hidden = !entries;
    if (!entries) return;
    token.classList.add("pointed");
    box.setAttribute("role", "status");
    box.replaceChildren(...entries.map((entry) => table(entry)));
    const place = token.getBoundingClientRect(), card = byId("chat").getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(place.left - card.left, card.width - box.offsetWidth - 8))}px`;
    box.style.top = `${place.bottom - card.top + 6}px`;
  }
}

function table({ token, logprob, top }) {
  const rows = top.some((one) => one.token === token) ? top : [{ token, logprob }, ...top];
  return element("table", {}, element("caption", { class: "unseen" }, `token ${written(token)}`), ...rows.map((one) => {
    const share = Math.exp(one.logprob), length = element("span", { class: "chance" });
    length.style.width = `${Math.max(1, 60 * share)}px`;
    return element("tr", { class: one.token === token ? "chosen" : "" }, element("th", { scope: "row" }, written(one.token)),
      element("td", {}, `${(100 * share).toFixed(1)}%`), element("td", {}, one.logprob.toFixed(2)), element("td", {}, length));
  }));
}

class Answer {
  constructor(view) {
    this.view = view;
    this.said = view.firstChild;
    this.text = "";
    this.waiting = [];
    this.tokens = 0;
    this.ending = null;
    this.asked = performance.now();
    this.first = this.last = null;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (choice === undefined) return;
    const content = choice.delta?.content ?? choice.text ?? "";
    const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    const entries = logprobsOf(choice.logprobs);
    if (content || thought || entries.length) {
      this.last = performance.now();
      this.first ??= this.last;
      this.tokens += event.usage ? 0 : Math.max(1, entries.length);
    }
    this.waiting.push(...entries);
    if (thought) this.thoughts().append(this.token(thought));
    if (content) {
      this.text += content;
      this.said.append(this.token(content));
    }
    if (choice.finish_reason) this.end(choice.finish_reason, false);
  }

  // Half a character has a token and no text yet: its numbers come with the rest of it.
  token(text) {
    const made = element("span", { class: "t" }, text);
    if (this.waiting.length) {
      made.logprobs = this.waiting;
      made.style.setProperty("--sure", Math.exp(Math.min(...this.waiting.map((entry) => entry.logprob))).toFixed(3));
    }
    this.waiting = [];
    return made;
  }

  thoughts() {
    if (!this.thinking) {
      this.thinking = element("div", { class: "said" });
      this.view.prepend(element("details", { class: "quiet", open: "" }, element("summary", {}, "Reasoning"), this.thinking));
    }
    return this.thinking;
  }

  end(how, failed) {
    this.ending = how;
    setText(this.view.lastChild, failed ? how : "");
    this.view.lastChild.classList.toggle("failed", failed);
  }

  summary() {
    const elapsed = (this.last - this.first) / 1000;
    const speed = this.tokens > 1 && elapsed > 0 ? `${count((this.tokens - 1) / elapsed)} tokens/s` : "";
    const first = this.first === null ? "" : `first after ${seconds((this.first - this.asked) / 1000)}`;
    return [this.tokens ? `${count(this.tokens)} tokens` : "", speed, first, this.ending ?? "answering"].filter(Boolean).join(" · ");
  }
}

// Of chats a list of tokens; of completions columns.
function logprobsOf(given) {
  if (given?.content) {
    return given.content.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs ?? [] }));
  }
  return (given?.tokens ?? []).map((token, place) => ({
    token, logprob: given.token_logprobs[place],
    top: Object.entries(given.top_logprobs?.[place] ?? {}).map(([name, logprob]) => ({ token: name, logprob })),
  }));
}
