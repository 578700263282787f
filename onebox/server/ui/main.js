// Which view is shown, whether the server is ready, and the key that it may ask for.

import { json, setKey } from "./api.js";
import { showBox, startBox } from "./box.js";
import { setModels, startChat } from "./chat.js";
import { byId, percent } from "./dom.js";
import { startStudio } from "./studio.js";

const VIEWS = ["chat", "studio", "box"];
const READY_MS = 15000;
const STARTING_MS = 1000;
let models = [];

function show() {
  const asked = location.hash.slice(1);
  if (asked && !VIEWS.includes(asked)) return; // a place within the view, such as #main
  const view = asked || "chat";
  for (const name of VIEWS) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = view;
  if (view === "box") showBox();
}

function phaseOf(ready) {
  if (!ready.phase) return ready.detail ? `${ready.status}: ${ready.detail}` : ready.status;
  return `starting: ${ready.phase}${ready.progress == null ? "" : ` ${percent(ready.progress)}`}`;
}

async function check() {
  const state = byId("state");
  let wait = STARTING_MS;
  try {
    const ready = await json("/health/ready", { known: [503] });
    if (ready.status !== "ready") {
      state.textContent = phaseOf(ready);
      state.className = "state waiting";
    } else {
      if (!models.length) {
        models = (await json("/v1/models")).data.map((model) => model.id);
        setModels(models);
      }
      state.textContent = models[0];
      state.className = "state ready";
      wait = READY_MS;
    }
  } catch (e) {
    state.textContent = e.status === 401 ? "waits for a key" : e.message;
    state.className = "state failed";
  }
  setTimeout(check, wait);
}

addEventListener("hashchange", show);
document.addEventListener("key-wanted", () => {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key-form").hidden = true;
  show();
});
startChat();
startStudio();
startBox();
show();
check();
