// The server's endpoints: JSON, and events of a stream. Failures are Failure with the server's own words.

const KEY = "onebox-key";

export class Failure extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export const key = () => sessionStorage.getItem(KEY) || "";
export const setKey = (value) => sessionStorage.setItem(KEY, value);

// relative to /ui/, so that a proxy's prefix stays in front
const url = (path) => new URL(`..${path}`, document.baseURI);

function headers() {
  const made = { "Content-Type": "application/json" };
  if (key()) made.Authorization = `Bearer ${key()}`;
  return made;
}

async function send(path, { body, signal } = {}) {
  const options = { method: body ? "POST" : "GET", headers: headers(), signal };
  if (body) options.body = JSON.stringify(body);
  try {
    return await fetch(url(path), options);
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new Failure("The server cannot be reached.");
  }
}

async function refusal(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // no JSON: the status has to do
  }
  if (response.status === 401) document.dispatchEvent(new Event("key-wanted"));
  const wait = response.headers.get("Retry-After");
  const said = (error && error.message) || `The server answered ${response.status}.`;
  return new Failure(said + (response.status === 429 && wait ? ` Try again in ${wait} s.` : ""), response.status, error && error.param);
}

/** The JSON of a GET, or of a POST when there is a body. `known`: other statuses whose JSON is an answer too. */
export async function json(path, { body, signal, known = [] } = {}) {
  const response = await send(path, { body, signal });
  if (!response.ok && !known.includes(response.status)) throw await refusal(response);
  return await response.json();
}

/** The JSON payloads of a stream of events. Throws Failure for one that is an error, and for one that breaks off. */
export async function* events(path, body, signal) {
  const response = await send(path, { body, signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (e) {
      if (e.name === "AbortError") throw e;
      throw new Failure("The connection broke off.");
    }
    if (part.done) throw new Failure("The answer broke off.");
    held += decoder.decode(part.value, { stream: true });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Failure(value.error.message || "The answer failed.");
      yield value;
    }
  }
}
