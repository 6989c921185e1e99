"use strict";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 50rem)");
const SHOWN_ROUNDS = 60;
const SUGGESTIONS = [
  "Work out these sums.\na) 13 + 17\nb) 2 + 17\nc) 19 + 9\nd) 17 + 19\ne) 14 + 6\nf) 6 + 18",
  "Work out these products.\na) 7 * 7\nb) 4 * 9\nc) 8 * 2\nd) 6 * 8\ne) 7 * 3\nf) 4 * 3",
  "Write a check for each call.\na) sub(27, 14)\nb) sub(24, 5)\nc) add(16, 3)\nd) sub(19, 9)",
];

const state = { model: null, strategies: [], messages: [], running: null };

// -- talking to the server -----------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not from this server: a proxy's page */ }
  if (response.status === 401) askForKey();
  return new Error(message);
}

function askForKey() {
  $("key-field").hidden = false;
  $("settings").open = true;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function loadModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await failure(response);
    showModel((await response.json()).data[0]);
    setStatus("ready", "ready");
  } catch (error) {
    setStatus("failed", error.message);
  }
}

function showModel(model) {
  const chosen = $("strategy").value || model.dflow.default_strategy;
  state.model = model.id;
  state.strategies = model.dflow.strategies;
  $("model").textContent = model.id;
  $("strategy").replaceChildren(...state.strategies.map(({ name }) => new Option(name, name, false, name === chosen)));
  $("max-tokens").max = model.max_model_len;
  showStrategy();
}

function showStrategy() {
  const most = state.strategies.find(({ name }) => name === $("strategy").value)?.max_draft_tokens ?? 0;
  $("drafts").max = most;
  $("drafts").value = most;
  $("drafts").disabled = most === 0;
  showValues();
}

function showValues() {
  $("drafts-value").textContent = $("drafts").value;
  $("temperature-value").textContent = Number($("temperature").value).toFixed(2);
}

function setStatus(kind, text) {
  $("status").className = `status ${kind}`;
  $("status").textContent = text;
}

// -- figures of one answer -----------------------------------------------------------------------------------------

class Figures {
  constructor() {
    this.sent = performance.now();
    this.first = null;
    this.tokens = 0;
    this.rounds = 0;
    this.inRounds = 0;
    this.usage = null;
    $("rounds").replaceChildren();
    for (const id of ["tau", "speed", "accepted"]) $(id).textContent = "–";
  }

  add({ num_tokens: tokens, num_accepted: accepted }) {
    this.tokens += tokens;
    if (this.first === null) {
      this.first = performance.now(); // the prompt's own token: it belongs to no round
    } else if (tokens > 0) {
      this.rounds += 1;
      this.inRounds += tokens;
      this.bar(tokens - accepted, accepted);
    }
    this.show();
  }

  bar(own, accepted) {
    const bar = document.createElement("i");
    for (const [tag, count] of [["b", own], ["u", accepted]]) {
      const part = document.createElement(tag);
      part.style.height = `${(100 * count) / (Number($("drafts").max) + 1)}%`;
      bar.append(part);
    }
    $("rounds").append(bar);
    if ($("rounds").childElementCount > SHOWN_ROUNDS) $("rounds").firstElementChild.remove();
  }

  get seconds() {
    return (performance.now() - this.first) / 1000;
  }

  show() {
    if (this.rounds === 0 || this.seconds === 0) return;
    $("tau").textContent = (this.inRounds / this.rounds).toFixed(2);
    $("speed").textContent = Math.round(this.inRounds / this.seconds);
  }

  finish(usage) {
    const details = usage.completion_tokens_details;
    const drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
    if (usage.dflow.rounds) $("tau").textContent = usage.dflow.tau_emitted.toFixed(2);
    if (drafted) $("accepted").textContent = `${Math.round((100 * details.accepted_prediction_tokens) / drafted)}%`;
    this.usage = usage;
  }

  line() {
    const parts = [`${this.tokens} tokens in ${this.rounds} rounds`];
    if (this.rounds) parts.push(`tau ${$("tau").textContent}`, `${$("speed").textContent} tokens/s`);
    if (this.first !== null) parts.push(`first token after ${Math.round(this.first - this.sent)} ms`);
    return parts.join(" · ");
  }
}

// -- the conversation ----------------------------------------------------------------------------------------------

function item(kind, text = "") {
  const li = document.createElement("li");
  const body = document.createElement("div");
  li.className = kind;
  body.className = "text";
  body.textContent = text;
  li.append(body);
  $("log").append(li);
  $("empty").hidden = true;
  return li;
}

function note(li, kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  if (kind === "error") line.setAttribute("role", "alert");
  li.append(line);
}

function write(body, pieces) {
  const scroll = $("scroll");
  const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
  for (const { text, drafted } of pieces) {
    const span = document.createElement("span");
    span.className = drafted ? "drafted" : "own";
    span.textContent = text;
    body.append(span);
  }
  if (atEnd) scroll.scrollTop = scroll.scrollHeight;
}

function request(messages) {
  const body = {
    model: state.model,
    messages,
    stream: true,
    stream_options: { include_usage: true, include_drafts: true },
    temperature: Number($("temperature").value),
    strategy: $("strategy").value,
    draft_tokens: Number($("drafts").value),
  };
  const most = Number.parseInt($("max-tokens").value, 10);
  return most > 0 ? { ...body, max_tokens: most } : body;
}

async function answer() {
  const running = new AbortController();
  const messages = state.messages; // a new chat meanwhile has a list of its own
  const li = item("assistant writing");
  const body = li.firstElementChild;
  const figures = new Figures();
  setRunning(running);
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(request(messages)), signal: running.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.dflow) figures.add(event.dflow);
      if (event.dflow) write(body, event.dflow.pieces);
      if (event.usage) figures.finish(event.usage);
    }
    setStatus("ready", "ready");
  } catch (error) {
    if (error.name !== "AbortError") note(li, "error", error.message);
  }
  li.classList.remove("writing");
  if (figures.tokens) note(li, "figures", figures.line() + (running.signal.aborted ? " · stopped" : ""));
  if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
  else messages.pop(); // nothing came: the question can be asked again
  setRunning(null);
}

function setRunning(running) {
  state.running = running;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("log").setAttribute("aria-busy", String(running !== null));
  if (running === null && !narrow.matches) $("prompt").focus({ preventScroll: true }); // a phone's keyboard hides the answer
}

function send(text) {
  if (state.running || !text.trim()) return;
  state.messages.push({ role: "user", content: text });
  item("user", text);
  $("scroll").scrollTop = $("scroll").scrollHeight;
  $("prompt").value = "";
  fit();
  answer();
}

function restart() {
  state.running?.abort();
  state.messages = [];
  $("log").replaceChildren();
  $("empty").hidden = false;
  new Figures();
}

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

// -- wiring --------------------------------------------------------------------------------------------------------

for (const text of SUGGESTIONS) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => send(text));
  $("suggestions").append(button);
}
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("input", fit);
$("stop").addEventListener("click", () => state.running?.abort());
$("new").addEventListener("click", restart);
$("strategy").addEventListener("change", showStrategy);
for (const id of ["drafts", "temperature"]) $(id).addEventListener("input", showValues);
$("key").addEventListener("change", loadModel);
$("key-field").addEventListener("submit", (event) => event.preventDefault()); // Enter changes the field, which is enough
if (narrow.matches) $("settings").open = false;
showValues();
loadModel();
