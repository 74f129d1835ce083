// Chats and completions with streaming, sampling controls, and the probabilities of every token.

import { element, find, problemOf, request, wordsOf } from "./common.js";

const settings = find("#settings");
const list = find("#messages");
const input = find("#input");
// {role, content, tokens, note, error}; tokens are {text, logprob, others: [{text, logprob}]}.
let messages = [];
let running = null;

// ---- requests ---------------------------------------------------------------------------------------------------------

function number(name) {
  const value = settings.elements[name].value;
  return value === "" ? undefined : Number(value);
}

function sampling() {
  const stop = settings.elements.stop.value.split("\n").filter((line) => line !== "");
  return {
    max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"),
    top_k: number("top_k") || undefined, repetition_penalty: number("repetition_penalty") || undefined,
    seed: number("seed"), stop: stop.length ? stop : undefined,
    stream: true, stream_options: { include_usage: true },
  };
}

function isChat() {
  return settings.elements.mode.value === "chat";
}

// The request that continues the conversation up to `history`.
function bodyFor(history) {
  if (!isChat()) return ["v1/completions", { prompt: history.map((message) => message.content).join(""), logprobs: 5, ...sampling() }];
  const system = settings.elements.system.value.trim();
  const asked = history.map(({ role, content }) => ({ role, content }));
  if (system) asked.unshift({ role: "system", content: system });
  return ["v1/chat/completions", { messages: asked, logprobs: true, top_logprobs: 5, ...sampling() }];
}

// The tokens of one event, in either API's form.
function tokensOf(choice) {
  if (choice.logprobs?.content) {
    return choice.logprobs.content.map(({ token, logprob, top_logprobs }) =>
      ({ text: token, logprob, others: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })) }));
  }
  if (choice.logprobs?.tokens) {
    return choice.logprobs.tokens.map((text, i) => ({
      text, logprob: choice.logprobs.token_logprobs[i],
      others: Object.entries(choice.logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
    }));
  }
  return [];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.startsWith("data:") ? block.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function generate() {
  const [path, body] = bodyFor(messages);
  const answer = { role: "assistant", content: "", tokens: [], note: "", error: "" };
  messages.push(answer);
  const view = addView(answer);
  const stopper = running = new AbortController();
  setBusy(true);
  const started = performance.now();
  let firstAt = 0, count = 0;
  try {
    const response = await request(path, {
      method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: stopper.signal,
    });
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(typeof event.error === "string" ? event.error : event.error.message);
      const choice = event.choices?.[0];
      if (event.usage) count = event.usage.completion_tokens;
      if (!choice) continue;
      firstAt ||= performance.now();
      const tokens = tokensOf(choice);
      answer.content += choice.delta?.content ?? choice.text ?? "";
      answer.tokens.push(...tokens);
      view.append(tokens.length ? tokens : [{ text: choice.delta?.content ?? choice.text ?? "", others: [] }]);
      view.note(speed(Math.max(count, answer.tokens.length), started, firstAt));
      if (choice.finish_reason === "length") answer.note = "stopped at max tokens";
    }
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else answer.error = wordsOf(error);
  }
  answer.note = [speed(Math.max(count, answer.tokens.length), started, firstAt), answer.note].filter(Boolean).join(", ");
  running = null;
  setBusy(false);
  view.finish();
}

function speed(count, started, firstAt) {
  if (!firstAt || !count) return "";
  const elapsed = (performance.now() - firstAt) / 1000;
  const rate = count > 1 && elapsed > 0 ? `, ${((count - 1) / elapsed).toFixed(1)} tokens/s` : "";
  return `${count} tokens${rate}, first after ${((firstAt - started) / 1000).toFixed(2)} s`;
}

// ---- messages ---------------------------------------------------------------------------------------------------------

function addView(message) {
  const text = element("div", { className: "text" });
  const note = element("span", { textContent: message.note });
  const tools = element("span", { className: "tools" });
  const name = message.role === "user" ? (isChat() ? "You" : "Text") : (isChat() ? "Model" : "Continuation");
  const problem = element("div", { className: "error" });
  problem.setAttribute("role", "alert");
  const box = element("article", { className: `message ${message.role}` },
    element("div", { className: "who" }, element("b", { textContent: name }), note, tools), text, problem);
  list.append(box);
  list.scrollTop = list.scrollHeight;
  // Who scrolls up to read is left there.
  const append = (tokens) => {
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    text.append(...tokens.map(tokenView));
    if (atEnd) list.scrollTop = list.scrollHeight;
  };
  append(message.tokens?.length ? message.tokens : [{ text: message.content, others: [] }]);
  const finish = () => {
    note.textContent = message.note;
    problem.textContent = message.error ?? "";
    tools.replaceChildren(...buttons(message, text));
    text.querySelector(".token")?.setAttribute("tabindex", "0");
  };
  if (message.role === "user" || message.note || message.error) finish();
  return { append, note: (words) => { note.textContent = words; }, finish };
}

function buttons(message, text) {
  const edit = element("button", { type: "button", textContent: "Edit" });
  edit.onclick = () => editMessage(message, text);
  if (message.role === "user") return [edit];
  const again = element("button", { type: "button", textContent: "Regenerate" });
  again.onclick = () => restart(messages.indexOf(message));
  return [again, edit];
}

// Forget what follows, and generate again.
function restart(index) {
  if (running) return;
  messages = messages.slice(0, index);
  redraw();
  generate();
}

function editMessage(message, text) {
  if (running) return;
  const area = element("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  area.setAttribute("aria-label", "Edit the message");
  const save = element("button", { type: "button", className: "primary", textContent: message.role === "user" ? "Save and generate" : "Save" });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  text.replaceChildren(area, save, " ", cancel);
  area.focus();
  cancel.onclick = redraw;
  area.onkeydown = (event) => {
    if (event.key === "Escape") redraw();
    if (event.key === "Enter" && event.ctrlKey) save.click();
  };
  save.onclick = () => {
    message.content = area.value;
    message.tokens = [];
    if (message.role === "user") restart(messages.indexOf(message) + 1);
    else redraw();
  };
}

function redraw() {
  list.replaceChildren();
  messages.forEach((message) => addView(message).finish());
}

function setBusy(busy) {
  find("#send").disabled = busy;
  find("#stop").disabled = !busy;
  list.setAttribute("aria-busy", busy);
}

// ---- probabilities ----------------------------------------------------------------------------------------------------

const tooltip = find("#probabilities");

function tokenView(token) {
  if (token.logprob === undefined || token.logprob === null) return document.createTextNode(token.text);
  const likely = Math.exp(token.logprob);
  const shade = likely < 0.1 ? "p0" : likely < 0.4 ? "p1" : likely < 0.8 ? "p2" : "p3";
  const view = element("span", { className: `token ${shade}`, textContent: token.text, tabIndex: -1 });
  view.onpointerenter = view.onfocus = () => showProbabilities(token, view);
  view.onpointerleave = view.onblur = () => tooltip.classList.add("hidden");
  return view;
}

function showProbabilities(token, view) {
  const rows = [token, ...token.others.filter((other) => other.text !== token.text)];
  rows.sort((a, b) => b.logprob - a.logprob);
  tooltip.replaceChildren(element("table", {}, ...rows.map((row) =>
    element("tr", { className: row === token ? "chosen" : "" },
      element("td", { className: "mono", textContent: JSON.stringify(row.text) }),
      element("td", { className: "number", textContent: `${(100 * Math.exp(row.logprob)).toFixed(1)} %` })))));
  tooltip.classList.remove("hidden");
  const place = view.getBoundingClientRect(), size = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  tooltip.style.top = `${place.bottom + size.height + 10 > innerHeight ? place.top - size.height - 6 : place.bottom + 6}px`;
}

// Tab reaches the first token of a message, left and right move from one to the next.
list.onkeydown = (event) => {
  const token = event.target.closest?.(".token");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!token || !step) return;
  const all = [...token.parentElement.querySelectorAll(".token")];
  all[all.indexOf(token) + step]?.focus();
  event.preventDefault();
};

// ---- begin ------------------------------------------------------------------------------------------------------------

find("#composer").onsubmit = (event) => {
  event.preventDefault();
  const content = input.value;
  if (running || content.trim() === "") return;
  input.value = "";
  messages.push({ role: "user", content, tokens: [], note: "", error: "" });
  addView(messages.at(-1));
  generate();
};

input.onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("#composer").requestSubmit();
  }
};

find("#stop").onclick = () => running?.abort();
find("#clear").onclick = () => { running?.abort(); messages = []; redraw(); input.focus(); };
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
settings.onsubmit = (event) => event.preventDefault();
settings.elements.shade.onchange = (event) => list.classList.toggle("shaded", event.target.checked);
settings.elements.mode.onchange = () => {
  find("#system-label").classList.toggle("hidden", !isChat());
  input.placeholder = isChat() ? "Write a message. Enter sends, Shift+Enter makes a new line." : "Write the beginning of a text.";
  redraw();
};

const info = await request("info").then((response) => response.json()).catch(() => ({}));
find("#model").textContent = info.model_id ?? "";
input.focus();
