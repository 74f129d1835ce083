// The batch as it runs: one request a second for what the scheduler knows.

import { element, find, problemOf, request, seconds, wordsOf } from "./common.js";

const INTERVAL = 1000;
const KEPT = 120;
// Answers over which times to the first token and gaps are counted.
const WINDOW = 30;

const answers = [];
let paused = false;

async function poll() {
  try {
    const response = await request("dashboard/data");
    if (!response.ok) throw new Error(await problemOf(response));
    const data = await response.json();
    // A server that was started again counts from zero.
    const last = answers.at(-1);
    if (last && (data.requests < last.requests || data.generated_tokens < last.generated_tokens)) answers.length = 0;
    answers.push(data);
    if (answers.length > KEPT) answers.shift();
    show(data);
  } catch (error) {
    showStatus(wordsOf(error), "bad");
  }
}

function show(data) {
  find("#model").textContent = data.model_id;
  if (data.restarting) showStatus("shards are being restarted", "bad");
  else showStatus(data.healthy ? "healthy" : "not healthy", data.healthy ? "good" : "bad");
  showTiles(data);
  showBlocks(data);
  showRunning(data);
  showWaiting(data);
  drawRates();
  drawSteps(data.steps);
}

function showStatus(text, kind) {
  const status = find("#status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `status ${kind}`;
}

// ---- figures ----------------------------------------------------------------------------------------------------------

function rate(name, before, after) {
  const elapsed = after.time - before.time;
  return elapsed > 0 ? Math.max(0, after[name] - before[name]) / elapsed : 0;
}

// Of the values between two answers: the smallest bound that this part of them does not exceed.
function quantile(name, part) {
  const first = answers[Math.max(0, answers.length - 1 - WINDOW)][name], last = answers.at(-1)[name];
  const recent = last.counts.map((count, i) => count - first.counts[i]);
  // Where nothing ended lately, all that is known.
  const counts = recent.some((count) => count > 0) ? recent : last.counts;
  const total = counts.reduce((sum, count) => sum + count, 0);
  let sum = 0;
  for (let i = 0; total && i < counts.length; i++) {
    sum += counts[i];
    if (sum >= total * part) return last.bounds[Math.min(i, last.bounds.length - 1)];
  }
  return 0;
}

function showTiles(data) {
  const before = answers.at(-2) ?? data;
  const failures = Object.entries(data.failures).filter(([, count]) => count);
  const restarts = Object.values(data.restarts).reduce((sum, count) => sum + count, 0);
  const hits = data.prompt_tokens ? (100 * data.cached_tokens) / data.prompt_tokens : 0;
  const used = data.blocks.total ? (100 * data.blocks.running) / data.blocks.total : 0;
  const tiles = [
    ["Running", data.num_running, `of ${data.max_rows} rows`],
    ["Queue", data.num_waiting, data.num_waiting ? `oldest ${seconds(data.oldest_waiting)}` : "empty"],
    ["Tokens/s", rate("generated_tokens", before, data).toFixed(0), `${data.generated_tokens} so far`],
    ["First token", seconds(quantile("time_to_first_token", 0.5)), `p99 ${seconds(quantile("time_to_first_token", 0.99))}`],
    ["Token gap", seconds(quantile("inter_token", 0.5)), `p99 ${seconds(quantile("inter_token", 0.99))}`],
    ["KV cache", `${used.toFixed(0)} %`, `${data.blocks.total} blocks of ${data.blocks.block_size}`],
    ["Prefix hits", `${hits.toFixed(0)} %`, `${data.preemptions} preemptions`],
    ["Requests", data.requests, failures.length ? failures.map(([name, count]) => `${count} ${name}`).join(", ") : "no failures"],
    ["Restarts", restarts, `${data.replayed_requests} replayed`],
  ];
  find("#tiles").replaceChildren(...tiles.map(([title, value, note]) =>
    element("div", { className: "tile" }, element("small", { textContent: title }),
      element("b", { textContent: value }), element("small", { textContent: note }))));
}

// ---- blocks and rows --------------------------------------------------------------------------------------------------

function showBlocks({ blocks, running }) {
  const parts = running.filter((row) => row.blocks).map((row) => [row.state, row.blocks, `request ${row.id}: ${row.blocks} blocks`]);
  // Blocks that several requests share count once.
  const sum = parts.reduce((all, [, count]) => all + count, 0), scale = sum > blocks.running ? blocks.running / sum : 1;
  parts.push(["cached", blocks.cached, `prefix cache: ${blocks.cached} blocks`]);
  const bar = find("#blocks");
  bar.replaceChildren(...parts.map(([kind, count, title]) => {
    const part = element("span", { className: kind, title });
    part.style.width = `${(100 * count * (kind === "cached" ? 1 : scale)) / blocks.total}%`;
    return part;
  }));
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${blocks.running} blocks of running requests, ${blocks.cached} cached, ${blocks.free} free`);
  const legend = [["prompt", "prompts being computed"], ["decode", "decoding"], ["cached", `prefix cache ${blocks.cached}`], ["free", `free ${blocks.free}`]];
  find("#blocks-legend").replaceChildren(...legend.map(([kind, text]) =>
    element("span", {}, element("i", { className: kind }), text)),
    element("span", { textContent: `running requests ${blocks.running}` }));
}

function cells(...values) {
  return element("tr", {}, ...values.map((value) => (value instanceof Node ? element("td", {}, value)
    : element("td", { textContent: value, className: typeof value === "number" || /^[\d.,]/.test(value) ? "number" : "" }))));
}

function progress(value, max, label) {
  const bar = element("progress", { value: Math.min(value, max), max: Math.max(max, 1), title: label });
  bar.setAttribute("aria-label", label);
  return bar;
}

function showRunning({ running, num_running, max_rows }) {
  find("#num-running").textContent = `${num_running} of ${max_rows} rows`;
  find("#running").replaceChildren(...running.map((row) => {
    const done = Math.min(row.computed_tokens, row.prompt_tokens);
    return cells(`#${row.id}`, row.state, progress(done, row.prompt_tokens, `${done} of ${row.prompt_tokens} prompt tokens`),
      progress(row.generated_tokens, row.max_new_tokens, `${row.generated_tokens} of ${row.max_new_tokens} tokens`),
      row.blocks, row.cached_tokens, row.priority, seconds(row.age));
  }));
}

function showWaiting({ waiting, num_waiting, oldest_waiting }) {
  find("#num-waiting").textContent = num_waiting ? `${num_waiting}, the oldest for ${seconds(oldest_waiting)}` : "empty";
  find("#waiting").replaceChildren(...waiting.map((row) => {
    const made = cells(`#${row.id}`, row.prompt_tokens, row.priority, seconds(row.age), "");
    made.lastChild.textContent = row.reason;
    made.lastChild.className = "";
    return made;
  }));
}

// ---- charts -----------------------------------------------------------------------------------------------------------

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas at the resolution of the screen, with the largest value written at its top.
function prepared(selector, most, label) {
  const canvas = find(selector), ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = colour("soft");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(label(most), 0, 11);
  pen.strokeStyle = colour("line");
  pen.strokeRect(0.5, 16.5, width - 1, height - 17);
  return { pen, width, height, y: (value) => height - 1 - ((height - 20) * value) / (most || 1) };
}

function drawRates() {
  const pairs = answers.slice(1).map((after, i) => [answers[i], after]);
  const series = { decode: pairs.map(([a, b]) => rate("generated_tokens", a, b)), prompt: pairs.map(([a, b]) => rate("prompt_tokens", a, b)) };
  const most = Math.max(1, ...series.decode, ...series.prompt);
  const { pen, width, y } = prepared("#rate", most, (value) => `${value.toFixed(0)} tokens/s`);
  for (const [name, values] of Object.entries(series)) {
    pen.strokeStyle = colour(name);
    pen.lineWidth = 1.6;
    pen.beginPath();
    values.forEach((value, i) => pen.lineTo(width - ((values.length - 1 - i) * width) / (KEPT - 1), y(value)));
    pen.stroke();
  }
}

function drawSteps(steps) {
  const times = steps.map((step) => step.total_time);
  bars("#steps", steps, (step) => {
    const forward = Math.min(step.forward_time, step.total_time);
    return [[step.prompt_tokens ? "prompt" : "decode", forward], ["cached", step.total_time - forward]];
  }, Math.max(0, ...times), seconds);
  const tokens = steps.map((step) => step.decodes + step.prompt_tokens);
  bars("#mix", steps, (step) => [["decode", step.decodes], ["prompt", step.prompt_tokens]], Math.max(0, ...tokens), (most) => `${most} tokens`);
  const slowest = steps.reduce((worst, step) => (worst && worst.total_time > step.total_time ? worst : step), null);
  find("#slowest").textContent = slowest
    ? `slowest: ${seconds(slowest.total_time)} (${slowest.prompt_tokens} prompt tokens, ${slowest.decodes} decodes, forward ${seconds(slowest.forward_time)})` : "";
}

function bars(selector, steps, parts, most, label) {
  const { pen, width, height, y } = prepared(selector, most, label);
  const each = width / Math.max(steps.length, 60);
  steps.forEach((step, i) => {
    let base = 0;
    for (const [name, value] of parts(step)) {
      pen.fillStyle = step.failed ? colour("bad") : colour(name);
      const top = y(base + value), bottom = base ? y(base) : height - 1;
      pen.fillRect(i * each, top, Math.max(each - 0.6, 0.6), Math.max(bottom - top, value ? 1 : 0));
      base += value;
    }
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => answers.length && show(answers.at(-1)));
addEventListener("resize", () => answers.length && show(answers.at(-1)));

// ---- begin ------------------------------------------------------------------------------------------------------------

find("#pause").onclick = (event) => {
  paused = !paused;
  event.currentTarget.textContent = paused ? "Go on" : "Pause";
  event.currentTarget.setAttribute("aria-pressed", paused);
};

async function run() {
  for (;;) {
    if (!paused && !document.hidden) await poll();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

run();
