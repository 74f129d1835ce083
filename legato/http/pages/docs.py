"""GET /docs: the OpenAPI document as an interactive page. Loads nothing from other hosts."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API – Legato</title>
<link rel="icon" href="pages/icon.svg">
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #2a7; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
  h1 small { font-size: 1rem; font-weight: normal; opacity: .7; }
  details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; }
  code, pre, textarea, input { font: 13px/1.45 ui-monospace, monospace; }
  pre, textarea { background: var(--soft); border: 0; border-radius: .3rem; padding: .6rem; width: 100%;
                  box-sizing: border-box; overflow: auto; white-space: pre-wrap; color: inherit; }
  .method { display: inline-block; min-width: 4.4rem; font-weight: bold; color: var(--accent); }
  table { border-collapse: collapse; width: 100%; font-size: .9rem; }
  td { border-top: 1px solid var(--line); padding: .25rem .5rem .25rem 0; vertical-align: top; }
  input { padding: .3rem; width: min(32rem, 90%); }
  button { padding: .3rem 1rem; margin: .4rem 0; }
</style>
<h1>Legato <small id="version"></small></h1>
<p id="description"></p>
<p><a href="api-doc/openapi.json">OpenAPI document</a></p>
<h2>Routes</h2>
<div id="routes" role="status">Loading the OpenAPI document ...</div>
<h2>Schemas</h2>
<div id="schemas"></div>
<script type="module">
import { request } from "./pages/common.js";

function element(tag, text, ...children) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

// Text in which `code` stands between backticks.
function prose(tag, text) {
  const node = element(tag);
  (text || "").split("`").forEach((part, index) => node.append(index % 2 ? element("code", part) : part));
  return node;
}

function typeName(schema) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeName).join(" | ");
  if (schema.type === "array") return "[" + typeName(schema.items) + "]";
  if (schema.additionalProperties) return "{" + typeName(schema.additionalProperties) + "}";
  return schema.enum ? schema.enum.map(value => JSON.stringify(value)).join(" | ") : schema.type || "any";
}

function fields(schema) {
  const table = element("table");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const required = (schema.required || []).includes(name) ? " (required)" : "";
    const fallback = "default" in field ? " = " + JSON.stringify(field.default) : "";
    table.append(element("tr", "",
      element("td", "", element("code", name)),
      element("td", "", element("code", typeName(field) + fallback + required)),
      prose("td", field.description)));
  }
  return schema.properties ? table : element("code", typeName(schema));
}

async function send(method, path, body, output) {
  output.textContent = "...";
  const options = body === null ? { method }
    : { method, body, headers: { "Content-Type": "application/json" } };
  try {
    const response = await request("." + path, options);
    output.textContent = response.status + " " + response.statusText + "\\n\\n";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    output.textContent = String(error);
  }
}

function route(method, path, operation) {
  const title = element("summary", "",
    element("span", method.toUpperCase()), element("code", path), " — ", prose("span", operation.summary));
  title.firstChild.className = "method";
  const node = element("details", "", title, prose("p", operation.description));
  let input = null;
  const place = element("input");
  place.value = path;
  if (path.includes("{")) node.append(element("p", "", element("label", "Path: ", place)));
  if (operation.requestBody) {
    const content = operation.requestBody.content["application/json"];
    node.append(element("p", "Body: " + typeName(content.schema)));
    input = element("textarea");
    input.rows = 10;
    input.value = JSON.stringify(content.example, null, 2);
    node.append(input);
  }
  const button = element("button", "Try it");
  const output = element("pre");
  button.onclick = () => send(method.toUpperCase(), place.value, input && input.value, output);
  node.append(button, output);
  const answers = element("table");
  for (const [status, response] of Object.entries(operation.responses)) {
    const types = Object.entries(response.content || {}).map(([type, body]) => type + ": " + typeName(body.schema));
    answers.append(element("tr", "", element("td", status), prose("td", response.description),
      element("td", "", element("code", types.join(", ")))));
  }
  node.append(answers);
  return node;
}

async function show() {
  const response = await request("api-doc/openapi.json");
  if (!response.ok) throw new Error(response.status + " " + response.statusText);
  const api = await response.json();
  document.getElementById("version").textContent = api.info.version;
  document.getElementById("description").append(prose("span", api.info.description));
  const routes = document.getElementById("routes");
  routes.textContent = "";
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods)) routes.append(route(method, path, operation));
  const schemas = document.getElementById("schemas");
  for (const [name, schema] of Object.entries(api.components.schemas))
    schemas.append(element("details", "", element("summary", "", element("code", name)),
      prose("p", schema.description), fields(schema)));
}

show().catch(error => {
  document.getElementById("routes").textContent = "The OpenAPI document cannot be shown: " + error.message;
});
</script>
</html>
"""
