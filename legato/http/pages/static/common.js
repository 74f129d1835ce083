// What the pages share: requests with a key, and building elements without HTML strings.

const KEY = "legato-key";

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function find(selector) {
  return document.querySelector(selector);
}

// A request to our own server. If it needs a key, the person is asked for one, and it is tried again.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (!(await askForKey(key !== null))) return response;
  }
}

let asking = null;

// One question for all requests that need an answer.
function askForKey(wasWrong) {
  asking ??= showKeyDialog(wasWrong).finally(() => { asking = null; });
  return asking;
}

function showKeyDialog(wasWrong) {
  const input = element("input", { type: "password", name: "key", autocomplete: "off", required: true });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  const form = element("form", { method: "dialog" },
    element("p", {
      textContent: wasWrong ? "That key is not valid. The server needs another one." : "This server needs an API key." }),
    element("label", {}, "API key ", input), " ",
    element("button", { textContent: "Use it", className: "primary" }), " ", cancel);
  const dialog = element("dialog", {}, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    cancel.onclick = () => dialog.close();
    form.onsubmit = () => { sessionStorage.setItem(KEY, input.value.trim()); };
    dialog.onclose = () => { dialog.remove(); resolve(input.value.trim() !== "" && sessionStorage.getItem(KEY) === input.value.trim()); };
  });
}

// What an answer says went wrong, in the words of either API.
export async function problemOf(response) {
  try {
    const body = await response.json();
    return typeof body.error === "string" ? body.error : body.error.message;
  } catch {
    return `The server answered ${response.status}`;
  }
}

// Browsers say "Failed to fetch" or "network error" where there is no answer, or no end of it.
export function wordsOf(error) {
  return error instanceof TypeError ? "The server does not answer, or the connection was lost" : error.message;
}

export function seconds(value) {
  if (!(value > 0)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
}
