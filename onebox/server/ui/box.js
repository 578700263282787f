// The box: the memory plan of this server, and the ladder of any model on any machine, as pictures with their tables.

import { Failure, json } from "./api.js";
import { byId, failure, gigabytes, grouped, make, speed, svg, table } from "./dom.js";

// name in the plan -> what it is, in the order of the picture
const USES = [
  ["weights", "weights"],
  ["workspace", "workspace: activations and sampling, at most"],
  ["graphs", "captured steps"],
  ["states", "recurrent states of answers under way"],
  ["kv_pages", "KV pages"],
  ["snapshots", "snapshots of the prefix cache"],
  ["host_snapshots", "snapshots in host memory"],
  ["host_kv_pages", "KV pages in host memory"],
];
const WAIT_MS = 250;
let timer = 0;
let asked = 0;

function bar(label, parts, total) {
  let x = 0;
  const rects = parts.map(([kind, title, bytes]) => {
    const width = (1000 * bytes) / total;
    const rect = svg("rect", { x: x.toFixed(2), y: "0", width: Math.max(width, 0).toFixed(2), height: "40", class: kind }, svg("title", {}, `${title}: ${gigabytes(bytes)}`));
    x += width;
    return rect;
  });
  return svg("svg", { viewBox: "0 0 1000 40", preserveAspectRatio: "none", class: "bar", role: "img", "aria-label": label }, ...rects);
}

async function showPlan() {
  const room = byId("plan");
  let plan;
  try {
    plan = await json("/v1/onebox/plan");
  } catch (e) {
    const none = e.status === 404;
    room.replaceChildren(none ? make("p", { class: "quiet" }, "The server behind this one has no memory plan.") : failure(e.message));
    return;
  }
  if (!plan.bytes) {
    room.replaceChildren(make("p", { class: "quiet" }, "This engine has no memory plan."));
    return;
  }
  const shared = plan.kind !== "discrete"; // else what is on the host has memory of its own
  const parts = USES.filter(([name]) => plan.bytes[name] > 0 && (shared || !name.startsWith("host_")));
  const rows = parts.map(([name, title]) => [name, title, plan.bytes[name]]);
  const unused = Math.max(0, plan.capacity_bytes - plan.bytes.used);
  rows.push(["unused", "not used", unused]);
  const legend = rows.map(([name, title, bytes]) =>
    make("tr", {}, make("td", {}, make("span", { class: `swatch ${name}` }), title), make("td", { class: "n" }, gigabytes(bytes)), make("td", { class: "n" }, `${((100 * bytes) / plan.capacity_bytes).toFixed(1)} %`)),
  );
  const facts = [
    ["longest prompt and answer", `${grouped(plan.max_model_len)} tokens`],
    ["answers at a time", grouped(plan.max_num_seqs)],
    ["KV room", `${grouped(plan.pages * plan.page_tokens)} tokens in ${grouped(plan.pages)} pages`],
    ["states kept for the prefix cache", grouped(plan.snapshots + plan.host_snapshots)],
    ["left free", gigabytes(plan.bytes.floor)],
  ];
  room.replaceChildren(
    make("p", {}, make("strong", {}, gigabytes(plan.bytes.used)), ` of ${gigabytes(plan.capacity_bytes)} that may be used on ${plan.device}`),
    bar(`Memory: ${rows.map(([, title, bytes]) => `${title} ${gigabytes(bytes)}`).join(", ")}`, rows, plan.capacity_bytes),
    make("div", { class: "split" },
      make("table", {}, make("caption", { class: "unseen" }, "Memory by use"), make("tbody", {}, ...legend)),
      make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    ),
    ...plan.notes.map((note) => make("p", { class: "quiet" }, note)),
  );
}

/** Rungs as bars: what the bandwidth allows, and in it what the engine is expected to reach. `narrow`: names above. */
function drawLadder(made, narrow) {
  const [left, width, after, step] = narrow ? [1, 230, 125, 48] : [172, 640, 130, 30];
  const most = Math.max(...made.ladder.map((rung) => rung.roof_tok_s));
  const rows = made.ladder.flatMap((rung, i) => {
    const y = 4 + i * step + (narrow ? 20 : 0);
    const [roof, expected] = [(width * rung.roof_tok_s) / most, (width * rung.expected_tok_s) / most];
    return [
      svg("text", { x: narrow ? 0 : left - 10, y: narrow ? y - 5 : y + 15, class: "name" }, rung.rung),
      svg("rect", { x: left, y, width: roof.toFixed(1), height: 20, rx: 3, class: "roof" }),
      svg("rect", { x: left, y, width: expected.toFixed(1), height: 20, rx: 3, class: "expected" }),
      svg("text", { x: (left + roof + 8).toFixed(1), y: y + 15, class: "value" }, `${speed(rung.expected_tok_s)} of ${speed(rung.roof_tok_s)}`),
    ];
  });
  const label = `Tokens a second by rung: ${made.ladder.map((r) => `${r.rung} ${speed(r.expected_tok_s)} expected of ${speed(r.roof_tok_s)}`).join("; ")}`;
  const view = `0 0 ${left + width + after} ${8 + made.ladder.length * step}`;
  return svg("svg", { viewBox: view, class: `rungs ${narrow ? "narrow" : "wide"}`, role: "img", "aria-label": label }, ...rows);
}

async function showLadder() {
  const room = byId("ladder");
  const mine = ++asked;
  const query = new URLSearchParams({
    model: byId("f-model").value,
    box: byId("f-box").value,
    context: byId("f-context").value || "4096",
    users: byId("f-users").value || "1",
  });
  try {
    const made = await json(`/v1/onebox/forecast?${query}`);
    if (mine !== asked) return;
    const ladder = made.ladder.map((r) => [r.rung, r.step_gb.toFixed(2), speed(r.roof_tok_s), speed(r.expected_tok_s)]);
    const advice = made.advice.flatMap((a) => [make("dt", {}, `${a.workload}: ${a.settings}, ${speed(a.tok_s)} tok/s`), make("dd", {}, a.reason)]);
    room.replaceChildren(
      make("p", { class: "key" },
        make("span", {}, make("span", { class: "swatch expected" }), "expected tokens a second"),
        make("span", {}, make("span", { class: "swatch roof" }), "what the memory's bandwidth allows"),
      ),
      drawLadder(made, false),
      drawLadder(made, true),
      make("details", { class: "fold" }, make("summary", {}, "The same as a table"), make("div", { class: "scroll" }, table("The ladder", ["Rung", "GB a step", "Roof tok/s", "Expected tok/s"], ladder, [1, 2, 3]))),
      make("h3", {}, "What to choose"),
      make("dl", { class: "advice" }, ...advice),
      ...made.notes.map((note) => make("p", { class: "quiet" }, note)),
    );
  } catch (e) {
    if (mine === asked) room.replaceChildren(failure(e instanceof Failure ? e.message : `${e.name}: ${e.message}`));
  }
}

async function fillChoices() {
  let known;
  try {
    known = await json("/v1/onebox/forecast");
  } catch (e) {
    byId("ladder").replaceChildren(e.status === 404 ? make("p", { class: "quiet" }, "The server behind this one makes no forecasts.") : failure(e.message));
    return false;
  }
  const options = (pairs) => pairs.map(([value, text]) => make("option", { value }, text));
  byId("f-model").replaceChildren(...options(known.models.map((name) => [name, name])));
  byId("f-box").replaceChildren(...options(Object.entries(known.boxes)));
  return true;
}

/** Draws the view anew, with the server's state of now. */
export async function showBox() {
  showPlan();
  if (byId("f-model").options.length || (await fillChoices())) showLadder();
}

export function startBox() {
  byId("forecast-form").addEventListener("submit", (event) => event.preventDefault());
  for (const kind of ["input", "change"])
    byId("forecast-form").addEventListener(kind, () => {
      clearTimeout(timer);
      timer = setTimeout(showLadder, WAIT_MS);
    });
}
