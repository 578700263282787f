// The chat: messages -> a streamed answer, with its speed, kept drafts and cached prompt tokens.

import { Failure, events, json } from "./api.js";
import { byId, failure, grouped, make, percent, speed, svg } from "./dom.js";

const STATS_MS = 2000;
const BUCKET_S = 0.25; // of the trace of speeds
const N_BUCKETS = 48;

let messages = []; // the conversation as the API takes it
let running = null; // the AbortController of the answer under way
let owed = []; // [call id, its field]: results that the next message brings along

/** Text -> paragraphs, and code between fences as code. Nothing else is given a meaning. */
function body(text) {
  const made = [];
  text.split(/^```/m).forEach((piece, i) => {
    if (i % 2 === 0) {
      if (piece.trim()) made.push(make("div", { class: "said" }, piece.trim()));
      return;
    }
    const [, language, code] = piece.match(/^([^\n]*)\n?([\s\S]*)$/);
    made.push(make("pre", { tabindex: "0", "aria-label": `Code ${language.trim()}` }, make("code", {}, code.replace(/\n$/, ""))));
  });
  return made;
}

/** Seconds and token counts of one answer -> its figures. */
class Figures {
  constructor() {
    this.began = performance.now();
    this.samples = []; // [seconds, tokens]
    this.usage = null;
  }

  take(usage) {
    this.usage = usage;
    this.samples.push([(performance.now() - this.began) / 1000, usage.completion_tokens]);
  }

  /** Tokens a second after the first event, which waited for the prompt. */
  get speed() {
    if (this.samples.length < 2) return null;
    const [first, last] = [this.samples[0], this.samples[this.samples.length - 1]];
    return last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : null;
  }

  get drafts() {
    const details = (this.usage && this.usage.completion_tokens_details) || {};
    const kept = details.accepted_prediction_tokens || 0;
    const all = kept + (details.rejected_prediction_tokens || 0);
    return all ? { kept, all, share: kept / all } : null;
  }

  get cache() {
    if (!this.usage || !this.usage.prompt_tokens) return null;
    const cached = (this.usage.prompt_tokens_details || {}).cached_tokens || 0;
    return { cached, all: this.usage.prompt_tokens, share: cached / this.usage.prompt_tokens };
  }

  /** Tokens a second of each stretch of BUCKET_S, the newest last. */
  rates() {
    const made = [];
    let [at, tokens] = this.samples[0] || [0, 0];
    for (const [seconds, n] of this.samples) {
      if (seconds - at < BUCKET_S) continue;
      made.push((n - tokens) / (seconds - at));
      [at, tokens] = [seconds, n];
    }
    return made.slice(-N_BUCKETS);
  }

  line(end) {
    const parts = [];
    if (this.usage) parts.push(`${grouped(this.usage.completion_tokens)} tokens`);
    if (this.speed) parts.push(`${speed(this.speed)} tok/s`);
    if (this.samples.length) parts.push(`first after ${this.samples[0][0].toFixed(2)} s`);
    if (this.drafts) parts.push(`drafts kept ${percent(this.drafts.share)} (${this.drafts.kept} of ${this.drafts.all})`);
    if (this.cache) parts.push(`prompt ${grouped(this.cache.all)}, ${grouped(this.cache.cached)} from cache`);
    if (end) parts.push(end);
    return parts.join(" · ");
  }
}

function trace(rates) {
  if (rates.length < 2) return [];
  const most = Math.max(...rates);
  const points = rates.map((rate, i) => `${((100 * i) / (rates.length - 1)).toFixed(1)},${(19 - (18 * rate) / (most || 1)).toFixed(1)}`);
  return [svg("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }))];
}

function showMeters(figures) {
  byId("meter-speed").textContent = figures.speed ? speed(figures.speed) : "–";
  byId("meter-trace").replaceChildren(...trace(figures.rates()));
  byId("meter-drafts").textContent = figures.drafts ? percent(figures.drafts.share) : "–";
  byId("meter-cache").textContent = figures.cache ? percent(figures.cache.share) : "–";
}

async function showTotals() {
  if (document.hidden || byId("chat").hidden) return;
  let stats;
  try {
    stats = await json("/v1/onebox/stats");
  } catch {
    return; // a server in front of another one has none, and the state line says what else is wrong
  }
  const share = (part, all) => (all ? `${percent(part / all)} of all` : "");
  byId("meter-drafts-all").textContent = share(stats.accepted_tokens, stats.drafted_tokens);
  byId("meter-cache-all").textContent = share(stats.cached_tokens, stats.prompt_tokens);
}

/** One answer on the page, filled while it comes. */
class Bubble {
  constructor(name) {
    this.text = "";
    this.thought = "";
    this.calls = [];
    this.content = make("div", { class: "content" });
    this.foot = make("p", { class: "figures quiet" });
    this.thinking = null;
    this.node = make("article", { class: "answer", "aria-label": `Answer of ${name}` }, this.content, this.foot);
    this.drawn = 0;
  }

  take(delta) {
    this.thought += delta.reasoning_content || delta.reasoning || "";
    this.text += delta.content || "";
    for (const part of delta.tool_calls || []) {
      const call = (this.calls[part.index] ||= { id: "", name: "", arguments: "" });
      call.id ||= part.id || "";
      call.name += (part.function && part.function.name) || "";
      call.arguments += (part.function && part.function.arguments) || "";
    }
    this.drawn ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawn = 0;
    const log = byId("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    if (this.thought && !this.thinking) {
      this.thinking = { head: make("summary", {}, "Thinking…"), body: make("div", { class: "said" }) };
      this.node.prepend(make("details", { class: "fold" }, this.thinking.head, this.thinking.body));
    }
    if (this.thinking) this.thinking.body.textContent = this.thought.trim();
    if (this.thinking && this.text.trim()) this.thinking.head.textContent = "Thinking";
    if (this.text) this.content.replaceChildren(make("div", { class: "said" }, this.text.trimStart()));
    if (follow) log.scrollTop = log.scrollHeight;
  }

  /** The last picture: code set as code, calls folded. */
  end(figures, end) {
    cancelAnimationFrame(this.drawn);
    this.draw();
    if (this.text) this.content.replaceChildren(...body(this.text));
    if (this.thinking) {
      const n = figures.usage && (figures.usage.completion_tokens_details || {}).reasoning_tokens;
      this.thinking.head.textContent = n ? `Thinking, ${grouped(n)} tokens` : "Thinking";
    }
    owed = this.calls.map((call) => {
      const field = make("textarea", { rows: "2", class: "code", "aria-label": `Result of ${call.name}`, placeholder: "its result: sent with your next message" });
      let shown = call.arguments;
      try {
        shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
      } catch {
        // cut by the token limit: shown as it came
      }
      this.content.append(
        make("details", { class: "fold" }, make("summary", {}, `Calls ${call.name}`), make("pre", {}, make("code", {}, shown)), field),
      );
      return [call.id, field];
    });
    this.foot.textContent = figures.line(end);
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  message() {
    const made = { role: "assistant", content: this.text };
    if (this.thought) made.reasoning_content = this.thought;
    if (this.calls.length)
      made.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return made;
  }
}

function tools() {
  const text = byId("tools").value.trim();
  if (!text) return null;
  let found;
  try {
    found = JSON.parse(text);
  } catch (e) {
    throw new Failure(`Tools are no JSON: ${e.message}.`);
  }
  if (!Array.isArray(found)) throw new Failure("Tools must be a JSON list, such as [{\"name\": \"weather\", \"parameters\": {}}].");
  return found.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

function request(history) {
  const system = byId("system").value.trim();
  const made = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    chat_template_kwargs: { enable_thinking: byId("think").checked },
  };
  const [longest, temperature, given] = [byId("max-tokens").value, byId("temperature").value, tools()];
  if (longest) made.max_tokens = Number(longest);
  if (temperature) made.temperature = Number(temperature);
  if (given) made.tools = given;
  return made;
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
  byId("log").setAttribute("aria-busy", String(controller !== null));
}

const ENDS = { length: "cut at the longest answer", content_filter: "refused" };

/** Answers `history`. Gives the message said, or null when nothing came. */
async function answer(history) {
  const bubble = new Bubble(byId("model").value);
  const figures = new Figures();
  const controller = new AbortController();
  let end = "";
  byId("log").append(bubble.node);
  setRunning(controller);
  try {
    for await (const chunk of events("/v1/chat/completions", request(history), controller.signal)) {
      if (chunk.usage) figures.take(chunk.usage);
      for (const choice of chunk.choices || []) {
        bubble.take(choice.delta || {});
        if (choice.finish_reason) end = ENDS[choice.finish_reason] || "";
      }
      showMeters(figures);
    }
  } catch (e) {
    end = e.name === "AbortError" ? "stopped" : "failed";
    if (end === "failed") bubble.node.append(failure(e instanceof Failure ? e.message : `${e.name}: ${e.message}`));
  } finally {
    setRunning(null);
    bubble.end(figures, end);
    showTotals();
  }
  return bubble.text || bubble.thought || bubble.calls.length ? bubble.message() : null;
}

async function ask(event) {
  event.preventDefault();
  const field = byId("message");
  const text = field.value.trim();
  if (running || !text) return;
  const results = owed.map(([id, result]) => ({ role: "tool", tool_call_id: id, content: result.value || "no result" }));
  const history = [...messages, ...results, { role: "user", content: text }];
  const sent = owed;
  owed = [];
  byId("log").querySelector(".welcome")?.remove();
  byId("log").append(make("article", { class: "question", "aria-label": "You" }, make("div", { class: "said" }, text)));
  field.value = "";
  const said = await answer(history);
  if (said) messages = [...history, said];
  else {
    owed = sent; // nothing came: all of it can be sent again
    if (!field.value) field.value = text;
  }
  field.focus();
}

function fresh() {
  running?.abort();
  messages = [];
  owed = [];
  byId("log").replaceChildren(
    make("div", { class: "welcome" }, make("p", {}, "Ask this server's model something."), make("p", { class: "quiet" }, "The conversation stays in this tab and is gone when it is closed.")),
  );
  showMeters(new Figures());
  byId("message").focus();
}

/** Names of served models -> the choice of them. */
export function setModels(names) {
  byId("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
}

export function startChat() {
  fresh();
  byId("ask").addEventListener("submit", ask);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("fresh").addEventListener("click", fresh);
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  setInterval(showTotals, STATS_MS);
}
