// Text of numbers and names; elements.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const by_id = (id) => document.getElementById(id);
const svg = by_id("curve-svg");
const DASHES = ["none", "7 4", "2 3", "11 3 2 3"];

const whole = (number) => Math.round(number).toLocaleString("en-US");

function memory_text(bytes) {
  const gib = bytes / GIB;
  if (gib > 0 && gib < 1) return `${(gib * 1024).toFixed(gib < 0.1 ? 1 : 0)} MiB`;
  if (gib >= 9999.5) return `${(gib / 1024).toLocaleString("en-US", { maximumSignificantDigits: 4 })} TiB`;
  return `${gib.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} GiB`;
}

const work_text = (operations) => (operations / 1e15).toLocaleString("en-US", { maximumSignificantDigits: 3 });

const time_text = (spent) => (spent >= 99.95 ? `${whole(spent)} s` : `${spent.toFixed(spent >= 9.995 ? 1 : 2)} s`);

function count_text(number) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return `${(number / size).toFixed(2)}${letter}`;
  }
  return String(number);
}

function short_length(tokens) {
  return tokens >= 2 ** 20 ? `${tokens / 2 ** 20}M` : `${tokens / 2 ** 10}k`;
}

function phase_text(name) {
  const [, pass, layer] = name.match(/^(forward|backward) (\d+)$/) || [];
  return pass ? `${pass} of layer ${layer}` : name;
}

const binds_text = (binds) => (binds === "host memory" ? binds : `GPU memory in ${phase_text(binds)}`);

/** Bytes as a person writes them in Python, rounded down. */
function written(size) {
  for (const [unit, name, digits] of [[GIB, "GiB", 10], [2 ** 20, "MiB", 1]]) {
    if (size >= unit) return `"${Math.floor((size * digits) / unit) / digits}${name}"`;
  }
  return String(size);
}

function config_text({ chunk_size, saves, offload, gpu_memory, on_host }) {
  const tuple = `(${saves.map((name) => `"${name}"`).join(", ")}${saves.length === 1 ? "," : ""})`;
  const parts = [`chunk_size=${chunk_size}`, `saves=${tuple}`];
  if (offload !== "none") parts.push(`offload="${offload}"`);
  if (gpu_memory !== null) parts.push(`gpu_memory=${written(gpu_memory)}`);
  if (on_host) parts.push(`weights="${weights_field(on_host)}"`);
  return `streambp.patch(model, streambp.StreamConfig(${parts.join(", ")}))`;
}

/** Tokens of "65536", "64k" or "1M"; NaN for anything else. */
function parse_length(text) {
  const match = /^([\d,]+(?:\.\d+)?)([kM]?)$/.exec(text.trim());
  const number = match ? Math.floor(Number(match[1].replaceAll(",", "")) * { "": 1, k: 2 ** 10, M: 2 ** 20 }[match[2]]) : NaN;
  return number >= 1 && number < data.longest ? number : NaN;
}

/** An element; `children` are nodes or text. */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A number to read, with the exact one in its `value`. */
function figure(key, value, text) {
  return element("data", { "data-key": key, value: String(value) }, text);
}

const gib = (key, bytes) => figure(key, bytes, memory_text(bytes));

function colour(profile, method) {
  const unpatched = profile.methods.filter((other) => !other.chunked);
  if (!method.chunked) return `var(--m${unpatched.indexOf(method) % 3})`;
  return method.offload === "none" ? "var(--stream)" : "var(--offload)";
}

function dash(profile, method) {
  const by = ({ split }) => (split ? split.by : "");
  const alike = profile.methods.filter((other) => other.chunked && other.offload === method.offload && by(other) === by(method));
  return method.chunked ? DASHES[alike.indexOf(method) % DASHES.length] : "none";
}
