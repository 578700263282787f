// The compression studio: a prompt, a question and a rate -> the shorter prompt, and a map of what stayed and why.

import { Failure, json } from "./api.js";
import { byId, failure, grouped, make, percent, table } from "./dom.js";

const WAIT_MS = 200; // after the last move of the slider
const EXAMPLE = `The harbour council met on Tuesday evening in the old customs house. The room was cold, because the heating had failed again in the morning, and two members kept their coats on throughout the meeting.

After a long talk about the paint of the benches, the council agreed that the eastern pier will be closed to lorries from 14 March. The engineer, Ines Duarte, had measured 11 mm of settlement at the third pile since last autumn, and said that the pile can carry people and bicycles but no vehicle heavier than 3.5 tonnes. Nobody wanted to wait for a second opinion.

There was also some discussion about the summer festival. Several members felt that the music was too loud last year, others felt that it was not, and the subject was put off until the next meeting, as it has been for some years now.

The repair is expected to cost 240,000 euros and to take nine weeks. The money comes from the dredging reserve. A ferry will carry goods to the island twice a day, at 7:30 and at 16:00, until the pier is open again. The meeting ended at a quarter to ten, and the caretaker locked the door.`;
const QUESTION = "Why is the eastern pier closed to lorries, and from when?";

let current = null; // the AbortController of the request under way
let timer = 0;
let cells = []; // {span, node} in reading order
let at = -1;

/** Parts of the original from the output and its trace. Offsets count code points, so texts are arrays of those. */
function restore(output, trace) {
  const stretches = trace.sources.map(() => []);
  for (const s of trace.slices) if (s.part >= 0) stretches[s.part].push([s.start, output.slice(s.out, s.out + s.end - s.start)]);
  for (const [part, start, text] of trace.drops) stretches[part].push([start, Array.from(text)]);
  return stretches.map((row) => row.sort((a, b) => a[0] - b[0]).flatMap(([, text]) => text));
}

function reasonOf(span) {
  const rank = span.rank == null ? "" : ` · passage ranked ${span.rank + 1}`;
  return `${span.kept ? "kept" : "dropped"}: ${span.rule} · ${span.kind} · score ${span.score.toFixed(3)}${rank}`;
}

function point(index) {
  if (!cells.length) return;
  cells[at]?.node.classList.remove("at");
  at = Math.max(0, Math.min(index, cells.length - 1));
  const { span, node, text } = cells[at];
  node.classList.add("at");
  node.scrollIntoView({ block: "nearest" });
  byId("heat").setAttribute("aria-activedescendant", node.id);
  const shown = text.length > 60 ? `${text.slice(0, 57)}…` : text;
  byId("reason").replaceChildren(make("q", {}, shown.replace(/\s+/g, " ")), ` ${reasonOf(span)}`);
}

/** Shares of the scores' range, without the outermost two per cent of each side. */
function heatOf(spans) {
  const scores = spans.map((s) => s.score).sort((a, b) => a - b);
  const cut = Math.floor(scores.length / 50);
  const [low, high] = [scores[cut], scores[scores.length - 1 - cut]];
  return (score) => (high > low ? Math.max(0, Math.min(1, (score - low) / (high - low))) : 1);
}

function drawHeat(output, trace) {
  const parts = restore(Array.from(output), trace);
  const heat = heatOf(trace.spans);
  cells = [];
  at = -1;
  const sections = parts.map((text, part) => {
    const spans = trace.spans.filter((span) => span.part === part);
    const pieces = [];
    let end = 0;
    for (const span of spans) {
      pieces.push(text.slice(end, span.start).join(""));
      const body = text.slice(span.start, span.end).join("");
      const node = make(span.kept ? "span" : "s", { id: `piece-${cells.length}`, "data-piece": String(cells.length), "aria-label": `${body}: ${reasonOf(span)}` }, body);
      if (span.kept) {
        node.className = span.rule.startsWith("score") ? "kept" : "kept rule";
        node.style.setProperty("--share", heat(span.score).toFixed(2)); // not an inline style: the policy forbids those
      }
      cells.push({ span, node, text: body });
      pieces.push(node);
      end = span.end;
    }
    pieces.push(text.slice(end).join(""));
    const all = spans.reduce((n, s) => n + s.end - s.start, 0);
    const kept = spans.reduce((n, s) => n + (s.kept ? s.end - s.start : 0), 0);
    return make("section", {}, make("h3", {}, `${trace.sources[part]} · ${all ? percent(kept / all) : "0 %"} of the characters kept`), make("div", { class: "text" }, ...pieces));
  });
  byId("heat").replaceChildren(...sections);
  byId("heat").removeAttribute("aria-activedescendant");
  byId("reason").textContent = "Point at a piece, or move through them with the arrow keys.";
}

function drawReasons(spans) {
  const counted = new Map();
  for (const span of spans) {
    const name = `${span.kept ? "kept" : "dropped"}: ${span.rule}`;
    const [pieces, characters] = counted.get(name) || [0, 0];
    counted.set(name, [pieces + 1, characters + span.end - span.start]);
  }
  const rows = [...counted].sort((a, b) => b[1][1] - a[1][1]).map(([name, [pieces, characters]]) => [name, grouped(pieces), grouped(characters)]);
  byId("reasons").replaceChildren(table("Reasons, counted", ["Reason", "Pieces", "Characters"], rows, [1, 2]));
}

async function shorten() {
  clearTimeout(timer);
  current?.abort();
  const prompt = byId("prompt").value;
  if (!prompt.trim()) {
    byId("studio-state").textContent = "Paste a prompt first, or try the example.";
    return;
  }
  const controller = (current = new AbortController());
  const state = byId("studio-state");
  state.textContent = "Shortening…";
  const body = { prompt, rate: Number(byId("rate").value) / 100, method: byId("method").value };
  if (byId("question").value.trim()) body.question = byId("question").value.trim();
  try {
    const made = await json("/v1/compress", { body, signal: controller.signal });
    const trace = await json(`/v1/onebox/traces/${made.trace_id}`, { signal: controller.signal });
    const [before, after] = [made.tokens_before, made.tokens_after];
    state.replaceChildren(make("strong", {}, `${grouped(before)} → ${grouped(after)} tokens`), `, ${percent(after / before)} kept, by ${made.method}`);
    byId("shorter").value = made.text;
    byId("copy").disabled = false;
    byId("why").hidden = false;
    drawHeat(made.text, trace.compression);
    drawReasons(trace.compression.spans);
  } catch (e) {
    if (e.name === "AbortError") return; // a newer one is under way
    state.replaceChildren(failure(e instanceof Failure ? e.message : `${e.name}: ${e.message}`));
    byId("shorter").value = "";
    byId("copy").disabled = true;
    byId("why").hidden = true;
  }
}

function soon() {
  byId("rate-shown").textContent = `${byId("rate").value} %`;
  clearTimeout(timer);
  if (byId("prompt").value.trim()) timer = setTimeout(shorten, WAIT_MS);
}

async function copy() {
  const field = byId("shorter");
  const button = byId("copy");
  try {
    await navigator.clipboard.writeText(field.value);
  } catch {
    field.select(); // no clipboard without https: the older way, which needs a selection
    if (!document.execCommand("copy")) {
      button.textContent = "Press Ctrl+C";
      return;
    }
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 };

export function startStudio() {
  byId("source").addEventListener("submit", (event) => {
    event.preventDefault();
    shorten();
  });
  byId("rate").addEventListener("input", soon);
  byId("method").addEventListener("change", soon);
  byId("example").addEventListener("click", () => {
    byId("prompt").value = EXAMPLE;
    byId("question").value = QUESTION;
    shorten();
  });
  byId("copy").addEventListener("click", copy);
  const heat = byId("heat");
  heat.addEventListener("keydown", (event) => {
    if (event.key in MOVES) point(at < 0 ? 0 : at + MOVES[event.key]);
    else if (event.key === "Home") point(0);
    else if (event.key === "End") point(cells.length - 1);
    else return;
    event.preventDefault();
  });
  heat.addEventListener("focus", () => at < 0 && heat.matches(":focus-visible") && point(0));
  for (const kind of ["pointerover", "click"])
    heat.addEventListener(kind, (event) => {
      const piece = event.target.closest("[data-piece]");
      if (piece) point(Number(piece.dataset.piece));
    });
}
