"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const OCTAVES = [10, 24]; // log2 of the shortest and the longest T of the slider and of the chart
const KINDS = ["weights", "optimizer", "gradients", "activations"];
const DASHES = ["none", "7 4", "2 3"];
const form = document.getElementById("controls");
const by_id = (id) => document.getElementById(id);
const svg = by_id("curve-svg");
let shown = null; // what the page shows now: see `evaluate`

// Text ---------------------------------------------------------------------------------------------------------------

const whole = (number) => Math.round(number).toLocaleString("en-US");

function memory_text(bytes) {
  const gib = bytes / GIB;
  if (gib >= 9999.5) return `${(gib / 1024).toLocaleString("en-US", { maximumSignificantDigits: 4 })} TiB`;
  return `${gib.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} GiB`;
}

const work_text = (operations) => (operations / 1e15).toLocaleString("en-US", { maximumSignificantDigits: 3 });

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

const binds_text = (binds) => (binds === "host memory" ? binds : `GPU memory, ${phase_text(binds)}`);

function config_text({ chunk_size, saves, offload }) {
  const tuple = `(${saves.map((name) => `"${name}"`).join(", ")}${saves.length === 1 ? "," : ""})`;
  const parts = [`chunk_size=${chunk_size}`];
  if (saves.length) parts.push(`saves=${tuple}`);
  if (offload !== "none") parts.push(`offload="${offload}"`);
  return `streambp.patch(model, streambp.StreamConfig(${parts.join(", ")}))`;
}

/** Tokens of "65536", "64k" or "1M"; NaN for anything else. */
function parse_length(text) {
  const match = /^([\d,]+(?:\.\d+)?)([kM]?)$/.exec(text.trim());
  const number = match ? Math.floor(Number(match[1].replaceAll(",", "")) * { "": 1, k: 2 ** 10, M: 2 ** 20 }[match[2]]) : NaN;
  return number >= 1 && number < data.longest ? number : NaN;
}

// Elements -----------------------------------------------------------------------------------------------------------

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
  const alike = profile.methods.filter((other) => other.chunked && other.offload === method.offload);
  return method.chunked ? DASHES[alike.indexOf(method) % 3] : "none";
}

// Settings -----------------------------------------------------------------------------------------------------------

function fill_controls() {
  const start = data.setting;
  const options = (select, pairs, chosen) =>
    select.replaceChildren(...pairs.map(([value, text]) => {
      const option = element("option", { value }, text);
      option.defaultSelected = String(value) === String(chosen);
      return option;
    }));
  options(form.training, data.profiles.map(({ training }, index) => [index, training]), 0);
  by_id("training-field").hidden = data.profiles.length < 2;
  const sizes = { 12: "12 B: Adam, float32 weights", 8: "8 B: Adam in float32", 4: "4 B: Adam in bf16", 0: "none" };
  if (!(start.optimizer in sizes)) sizes[start.optimizer] = `${start.optimizer} B a parameter`;
  options(form.optimizer, Object.entries(sizes).sort(([a], [b]) => b - a), start.optimizer);
  const chunked = data.profiles[0].profile.methods.filter((method) => method.chunked);
  const choices = (values, words) => [["auto", "best"], ...[...new Set(values)].map((value) => [value, words[value] || value])];
  options(form.saves, choices(chunked.map((method) => method.saves.join("+")), { "": "nothing" }), "auto");
  options(form.offload, choices(chunked.map((method) => method.offload), { cpu: "to host" }), "auto");
  for (const stage of [0, 1, 2, 3]) {
    const radio = element("input", { type: "radio", name: "zero", value: stage, "aria-label": `ZeRO stage ${stage}` });
    radio.defaultChecked = stage === start.zero;
    by_id("zero").append(element("label", {}, radio, String(stage)));
  }
  form.gpu.defaultValue = data.memory.gpu / GIB;
  form.host.defaultValue = data.memory.host === null ? "" : data.memory.host / GIB;
  form.gpus.defaultValue = start.gpus;
  form.on_host.defaultChecked = start.optimizer_on_host;
  form.accumulate.defaultChecked = start.accumulate;
  form.T.defaultValue = data.seq_len.toLocaleString("en-US");
  const slider = by_id("T-slider");
  [slider.min, slider.max, slider.step] = [OCTAVES[0], OCTAVES[1], 1 / 16];
  for (const [index, mark] of [...by_id("T-slider-ends").children].entries()) {
    const part = (10 + 4 * index - OCTAVES[0]) / (OCTAVES[1] - OCTAVES[0]);
    mark.style.left = index ? `calc(${100 * part}% + ${8 - 16 * part}px)` : "0";
  }
}

/** Settings that the address carries after "#", as `write_hash` wrote them. */
function read_hash(hash) {
  for (const [name, value] of new URLSearchParams(hash.slice(1))) {
    const control = form.elements[name];
    if (name === "theme") document.documentElement.dataset.theme = value;
    else if (control && control.type === "checkbox") control.checked = value === "1";
    else if (control) control.value = value;
  }
}

function write_hash() {
  const pairs = ["T", "gpu", "host", "gpus", "zero", "training", "optimizer", "on_host", "accumulate", "saves", "offload"].map(
    (name) => [name, form[name].type === "checkbox" ? Number(form[name].checked) : form[name].value.replaceAll(",", "")],
  );
  const theme = document.documentElement.dataset.theme;
  if (theme) pairs.push(["theme", theme]);
  history.replaceState(null, "", `#${new URLSearchParams(pairs)}`);
}

/** The controls as a profile, setting, memory (of one rank) and T; null while one of them is out of range. */
function read_controls() {
  const seq_len = parse_length(form.T.value), gpus = form.gpus.valueAsNumber, host = form.host.valueAsNumber;
  form.T.setAttribute("aria-invalid", String(!seq_len));
  by_id("T-hint").textContent = seq_len ? "" : `T is a whole number from 1 to ${whole(data.longest)}, such as 65536, 64k or 1M.`;
  const wrong = form.querySelector("input:invalid");
  by_id("problem").textContent = wrong ? `${wrong.labels[0].textContent}: ${wrong.validationMessage}` : "";
  if (!seq_len || wrong) return null;
  const setting = {
    ...data.setting, gpus, zero: Number(form.zero.value), optimizer: Number(form.optimizer.value),
    optimizer_on_host: form.on_host.checked, accumulate: form.accumulate.checked,
  };
  const memory = {
    gpu: Math.floor(form.gpu.valueAsNumber * GIB),
    host: Number.isNaN(host) ? null : Math.floor(Math.floor(host * GIB) / gpus),
    reserve: data.memory.reserve,
  };
  return { profile: data.profiles[form.training.value].profile, seq_len, setting, memory };
}

/** Everything that the page shows. */
function evaluate({ profile, seq_len, setting, memory }) {
  const { value: saves } = form.saves, { value: offload } = form.offload;
  const allowed = profile.methods.filter((method) => !method.chunked
    || ((saves === "auto" || saves === method.saves.join("+")) && (offload === "auto" || offload === method.offload)));
  if (!allowed.some((method) => method.chunked)) return null;
  const size = chunk_sizes(profile.batch_size).at(-1);
  const plan = plan_profile({ ...profile, methods: allowed }, seq_len, memory, setting);
  const rows = profile.methods.map((method) => ({
    method, at: peak(profile, method, seq_len, size, setting), flops: flops(method, seq_len),
    longest: longest(profile, method, memory, setting), chosen: plan.choice !== null && plan.choice.method === method.name,
    offered: allowed.includes(method),
  }));
  const closest = rows.filter((row) => row.offered && row.method.chunked)
    .reduce((one, other) => (other.longest.seq_len - one.longest.seq_len || one.at.total - other.at.total) > 0 ? other : one);
  return { profile, seq_len, setting, memory, size, plan, rows, closest };
}

// Results ------------------------------------------------------------------------------------------------------------

function show_head() {
  const { profile } = shown;
  const sum = (field) => profile.groups.reduce((total, group) => total + group[field], 0);
  const trained = sum("trainable") === sum("parameters") ? "all trained" : `${count_text(sum("trainable"))} trained`;
  const rows = profile.batch_size > 1 ? `${profile.batch_size} rows` : "1 row";
  by_id("name").textContent = data.name;
  document.title = `${data.name}: memory plan`;
  by_id("about").textContent = [
    profile.model, `${count_text(sum("parameters"))} parameters, ${trained}`, profile.dtype, `${profile.layers} layers`,
    `${rows} a step on each GPU`,
  ].join(" · ");
}

function show_verdict() {
  const { plan, seq_len, memory, closest } = shown, { choice, best } = plan;
  const card = by_id("verdict"), limit = usable(memory), at = choice ? choice.peak : closest.at;
  card.dataset.fits = choice ? "yes" : "no";
  by_id("verdict-title").textContent = `${whole(seq_len)} tokens ${choice ? "fit" : "do not fit"}`;
  const short = at.total > limit ? `needs ${memory_text(at.total)} of the GPU` : `needs ${memory_text(at.host)} of host memory`;
  by_id("verdict-detail").textContent = choice
    ? `with ${choice.method} in chunks of ${whole(choice.chunk_size)} tokens.`
    : `${closest.method.name}, which comes closest, ${short}.`;
  const work = choice ? choice.flops : closest.flops;
  const host_limit = memory.host === null ? "no limit" : `of ${memory_text(memory.host)}`;
  const cells = [
    ["Peak per GPU", gib("peak", at.total), `of ${memory_text(limit)} usable`],
    ["Host per GPU", gib("host", at.host), host_limit],
    ["Longest that fits", figure("longest", best.seq_len, whole(best.seq_len)), "tokens"],
    ["Arithmetic", figure("flops", work, `${work_text(work)} PFLOP`), "a step"],
  ];
  by_id("figures").replaceChildren(...cells.map(([term, value, small]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, value, element("small", {}, small)))));
  by_id("code-box").hidden = !choice;
  const pieces = choice ? config_text(choice).split(/(?<=\()/) : [];
  by_id("code").replaceChildren(...pieces.flatMap((piece) => [piece, element("wbr")]));
  by_id("usable").textContent = `${memory_text(limit)} usable: ${Math.round(100 * memory.reserve)} % is left alone.`;
}

function show_levers() {
  const { plan } = shown;
  by_id("binds").replaceChildren(
    plan.best.seq_len ? "What binds the longest sequence: " : "Not even one token fits. What binds: ",
    element("strong", { "data-key": "binds", "data-value": plan.binds }, binds_text(plan.binds)),
    plan.levers.length ? `. What would ${plan.best.seq_len ? "allow a longer one" : "help"}:` : ".");
  by_id("levers").replaceChildren(...plan.levers.map((lever) => {
    const apply = element("button", { type: "button", "aria-label": `Apply: ${lever.change}` }, "Apply");
    apply.addEventListener("click", () => {
      form.gpus.value = lever.setting.gpus;
      form.zero.value = lever.setting.zero;
      form.on_host.checked = lever.setting.optimizer_on_host;
      form.gpu.value = lever.memory.gpu / GIB;
      if (lever.memory.host !== null) form.host.value = (lever.memory.host * lever.setting.gpus) / GIB;
      update();
      by_id("verdict-title").scrollIntoView({ block: "nearest" });
    });
    const reach = figure(`lever ${lever.change}`, lever.seq_len, whole(lever.seq_len));
    return element("li", {}, element("span", {}, lever.change[0].toUpperCase() + lever.change.slice(1)),
      element("span", {}, "up to ", reach, " tokens"), apply);
  }));
}

function swatch(method) {
  const line = drawn("line", { x1: 0, x2: 26, y1: 4, y2: 4, class: "curve" });
  line.style.strokeDasharray = dash(shown.profile, method);
  line.style.setProperty("--c", colour(shown.profile, method));
  const box = drawn("svg", { class: "swatch", viewBox: "0 0 26 8", "aria-hidden": "true" });
  box.append(line);
  return box;
}

function show_methods() {
  const { rows, seq_len, memory } = shown, limit = usable(memory);
  by_id("peak-head").textContent = `Peak at ${whole(seq_len)}`;
  by_id("methods").tBodies[0].replaceChildren(...rows.map(({ method, at, flops: work, longest: reach, chosen, offered }) => {
    const label = element("th", { scope: "row" }, swatch(method), method.name);
    if (chosen) label.append(element("span", { class: "tag" }, "chosen"));
    const cell = (name, over, ...content) =>
      element("td", { "data-label": name, ...(over && { class: "over-limit" }) }, ...content);
    const key = method.name;
    const row = element("tr", { class: chosen ? "chosen" : offered ? "" : "other" }, label,
      cell("peak", at.total > limit, gib(`peak ${key}`, at.total)),
      cell("host", memory.host !== null && at.host > memory.host, gib(`host ${key}`, at.host)),
      cell("PFLOP", false, figure(`flops ${key}`, work, work_text(work))),
      cell("longest", false, figure(`longest ${key}`, reach.seq_len, whole(reach.seq_len))),
      cell("stopped by", false, binds_text(reach.binds).replace(" memory,", ",")));
    row.addEventListener("pointerenter", () => light(method.name));
    row.addEventListener("pointerleave", () => light(null));
    return row;
  }));
}

function show_left_out() {
  const { left_out } = shown.profile;
  by_id("left-out").textContent = left_out.length ? `Not counted: ${left_out.join("; ")}` : "";
}

function light(name) {
  svg.classList.toggle("dim", name !== null);
  for (const line of svg.querySelectorAll("[data-method]")) line.classList.toggle("lit", line.dataset.method === name);
}

function show_phases() {
  const { rows, plan, profile, seq_len, setting, memory, closest } = shown, select = by_id("step");
  const options = [["", `the ${plan.choice ? "chosen" : "closest"} method`], ...rows.map(({ method }) => [method.name, method.name])];
  const wanted = options.some(([value]) => value === select.value) ? select.value : "";
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = wanted;
  const row = rows.find(({ method }) => method.name === wanted) || rows.find(({ chosen }) => chosen) || closest;
  const chunk_size = row.chosen ? plan.choice.chunk_size : shown.size;
  const at = peak(profile, row.method, seq_len, chunk_size, setting), limit = usable(memory);
  const chunks = row.method.chunked ? ` in chunks of ${whole(Math.min(chunk_size, seq_len))}` : "";
  by_id("phases-note").textContent = `${row.method.name}, ${whole(seq_len)} tokens${chunks}; of the layers of a kind, the first `
    + `and the last. The line is the usable memory, ${memory_text(limit)}.`;
  by_id("kinds").replaceChildren(...KINDS.map((kind) =>
    element("li", { style: `--c: var(--${kind})` }, element("i"), `${kind[0].toUpperCase()}${kind.slice(1)} `,
      element("b", {}, gib(kind, at[kind])))), element("li", {}, `in ${phase_text(at.phase)}`));
  const scale = 100 / Math.max(1.02 * limit, at.total);
  by_id("phases").replaceChildren(...Object.entries(at.phases).map(([name, total]) => {
    const part = at.parts.get(name);
    const sizes = [at.weights, at.optimizer, part.gradients, part.activations];
    const bar = element("span", { class: "bar" });
    sizes.forEach((size, index) => {
      const left = scale * sizes.slice(0, index).reduce((sum, other) => sum + other, 0);
      if (size > 0) bar.append(element("span", {
        class: "kind", style: `--c: var(--${KINDS[index]}); left: ${left}%; width: ${scale * size}%`,
      }));
    });
    bar.append(element("span", { class: "mark", style: `left: ${scale * limit}%` }));
    const worst = name === at.phase;
    const item = element("li", { tabindex: "0", ...(worst && { class: "worst" }) },
      element("span", {}, phase_text(name), worst ? element("span", { class: "hidden" }, " (the peak)") : ""), bar,
      element("span", { class: `total${total > limit ? " over-limit" : ""}` }, gib(`phase ${name}`, total)));
    const lines = KINDS.map((kind, index) => [kind, memory_text(sizes[index])]);
    item.setAttribute("aria-label", `${phase_text(name)}, ${memory_text(total)}: ${lines.map(([kind, size]) => `${kind} ${size}`).join(", ")}`);
    const tip_at = (page_x, page_y) => show_tip(page_x, page_y, phase_text(name),
      lines.map(([kind, size]) => [element("i", { style: `--c: var(--${kind})` }), kind, size]));
    item.addEventListener("pointermove", (event) => tip_at(event.pageX, event.pageY));
    item.addEventListener("focus", () => {
      if (!item.matches(":focus-visible")) return;
      const box = bar.getBoundingClientRect();
      tip_at(box.left + scrollX + 40, box.bottom + scrollY);
    });
    for (const leave of ["pointerleave", "blur"]) item.addEventListener(leave, hide_tip);
    return item;
  }));
}

function show_modules() {
  const rows = [];
  const add = (node, depth) => {
    const name = node.name ? `${node.name} ` : "", times = node.count > 1 ? `${node.count} × ` : "";
    rows.push(element("tr", {},
      element("th", { scope: "row", style: `--depth: ${depth}` }, name, element("small", {}, `${times}${node.kind}`)),
      element("td", {}, figure(`parameters ${rows.length}`, node.parameters, count_text(node.parameters))),
      element("td", {}, figure(`activation ${rows.length}`, node.activation, (node.activation / 1024).toFixed(1)))));
    for (const child of node.children) add(child, depth + 1);
  };
  add(shown.profile.tree, 0);
  by_id("modules").tBodies[0].replaceChildren(...rows);
}

// Chart --------------------------------------------------------------------------------------------------------------

/** Where T and bytes lie, for the figure's width. */
function axes() {
  const width = Math.max(260, by_id("curve").clientWidth), narrow = width < 520;
  const box = { left: narrow ? 42 : 52, right: width - (narrow ? 8 : 14), top: 24, bottom: (narrow ? 290 : 370) - 38 };
  const lowest = Math.min(...shown.rows.map(({ method }) => at_length(method, 2 ** OCTAVES[0])), usable(shown.memory));
  const ends = [Math.floor(Math.log2(lowest) - 0.15), Math.ceil(Math.log2(usable(shown.memory)) + 1.6)];
  return {
    width, narrow, box, ends,
    x: (tokens) => box.left + ((Math.log2(tokens) - OCTAVES[0]) / (OCTAVES[1] - OCTAVES[0])) * (box.right - box.left),
    y: (bytes) => box.bottom - ((Math.log2(bytes) - ends[0]) / (ends[1] - ends[0])) * (box.bottom - box.top),
  };
}

const at_length = (method, tokens) => peak(shown.profile, method, tokens, shown.size, shown.setting).total;

function curve(method, from, to, { x, y, box }) {
  const lengths = [from];
  for (let octave = Math.floor(Math.log2(from) * 8 + 1) / 8; 2 ** octave < to; octave += 1 / 8) lengths.push(2 ** octave);
  if (to > from) lengths.push(to);
  return lengths.map((tokens) => `${(x(tokens) - box.left).toFixed(1)},${(y(at_length(method, tokens)) - box.top).toFixed(1)}`).join(" ");
}

function draw_frame(chart) {
  const { x, y, box, ends, narrow, width } = chart, limit = usable(shown.memory);
  const line = (x1, y1, x2, y2, name) => svg.append(drawn("line", { x1, y1, x2, y2, class: name }));
  for (let octave = OCTAVES[0]; octave <= OCTAVES[1]; octave += 2) {
    line(x(2 ** octave), box.top, x(2 ** octave), box.bottom, "grid");
    if (narrow && (octave - OCTAVES[0]) % 4) continue;
    const anchor = octave === OCTAVES[1] ? "end" : "middle";
    svg.append(drawn("text", { x: x(2 ** octave) + (anchor === "end" ? 4 : 0), y: box.bottom + 17, "text-anchor": anchor }, short_length(2 ** octave)));
  }
  const every = Math.ceil((ends[1] - ends[0]) / 9);
  for (let octave = ends[0]; octave <= ends[1]; octave += every) {
    line(box.left, y(2 ** octave), box.right, y(2 ** octave), "grid");
    const label = octave < 30 ? (2 ** octave / GIB).toPrecision(2).replace(/\.?0+$/, "") : whole(2 ** octave / GIB);
    svg.append(drawn("text", { x: box.left - 7, y: y(2 ** octave) + 4, "text-anchor": "end" }, label));
  }
  svg.append(drawn("text", { x: 0, y: 12 }, "GiB on each GPU"));
  svg.append(drawn("text", { x: width / 2, y: box.bottom + 34, "text-anchor": "middle" }, "tokens per row, T"));
  svg.append(drawn("rect", { x: box.left, y: box.top, width: box.right - box.left, height: y(limit) - box.top, class: "over" }));
  line(box.left, y(limit), box.right, y(limit), "limit");
  svg.append(drawn("text", { x: box.right - 6, y: y(limit) - 7, "text-anchor": "end", class: "limit-label" },
    `${memory_text(limit)}${narrow ? "" : " usable"}`));
}

function draw_chart() {
  const chart = axes(), { x, y, box, width } = chart, { rows, seq_len, plan } = shown;
  const [first, last] = OCTAVES.map((octave) => 2 ** octave);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${box.bottom + 38}`);
  draw_frame(chart);
  const inner = drawn("svg", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top });
  svg.append(inner);
  const sorted = [...rows].sort((one, other) => one.chosen - other.chosen);
  for (const { method, longest: reach, chosen } of sorted) {
    const end = Math.min(Math.max(reach.seq_len, first), last);
    for (const [from, to, beyond] of [[first, end, false], [end, last, true]]) {
      if (to === from || (beyond && reach.seq_len >= last)) continue;
      const line = drawn("polyline", {
        points: curve(method, from, to, chart), class: `curve${beyond ? " beyond" : ""}${chosen ? " chosen" : ""}`,
        "data-method": method.name,
      });
      line.style.setProperty("--c", colour(shown.profile, method));
      line.style.strokeDasharray = dash(shown.profile, method);
      inner.append(line);
    }
    if (reach.seq_len >= first && reach.seq_len <= last) {
      const mark = drawn("circle", { cx: x(reach.seq_len), cy: y(at_length(method, reach.seq_len)), r: 3.5, class: "end", "data-method": method.name });
      mark.style.setProperty("--c", colour(shown.profile, method));
      svg.append(mark);
    }
  }
  svg.append(drawn("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, class: "frame" }));
  if (seq_len >= first && seq_len <= last) {
    svg.append(drawn("line", { x1: x(seq_len), x2: x(seq_len), y1: box.top, y2: box.bottom, class: "now" }));
    const place = x(seq_len), anchor = place > width - 70 ? "end" : place < box.left + 130 ? "start" : "middle";
    const shift = anchor === "start" ? Math.max(0, 108 - place) : 0;
    svg.append(drawn("text", { x: place + shift, y: 12, "text-anchor": anchor, class: "now-label" }, `T = ${whole(seq_len)}`));
    if (plan.choice) svg.append(drawn("circle", { cx: x(seq_len), cy: y(plan.choice.peak.total), r: 5.5, class: "dot" }));
  }
  by_id("curve-note").textContent = `A circle marks the longest sequence that fits, the dot the chosen step. Streamed methods `
    + `are drawn with their smallest chunks, ${whole(shown.size)} tokens. Point at the chart to read it, or click to set T.`;
}

/** T under the pointer, to a sixteenth of an octave; null outside of the chart. */
function pointed(event) {
  const { box } = axes(), place = event.clientX - svg.getBoundingClientRect().left;
  const part = (place - box.left) / (box.right - box.left);
  if (part < 0 || part > 1) return null;
  return Math.round(2 ** (Math.round((OCTAVES[0] + part * (OCTAVES[1] - OCTAVES[0])) * 16) / 16));
}

function point_at_chart(event) {
  const tokens = shown && pointed(event);
  svg.querySelector(".hair")?.remove();
  if (!tokens) return hide_tip();
  const { x, box } = axes();
  svg.append(drawn("line", { x1: x(tokens), x2: x(tokens), y1: box.top, y2: box.bottom, class: "hair" }));
  const lines = shown.rows.map(({ method, longest: reach }) => [
    swatch(method), method.name,
    memory_text(at_length(method, tokens)) + (tokens > reach.seq_len ? " ✕" : ""),
  ]);
  return show_tip(event.pageX, event.pageY, `${whole(tokens)} tokens (✕: too long)`, lines);
}

// Tooltip ------------------------------------------------------------------------------------------------------------

function show_tip(page_x, page_y, title, lines) {
  const tip = by_id("tip");
  tip.replaceChildren(element("strong", {}, title), ...lines.map(([mark, name, value]) =>
    element("div", {}, mark, element("span", {}, name), element("b", {}, value))));
  tip.hidden = false;
  const room = document.documentElement.clientWidth + scrollX - tip.offsetWidth - 8;
  const flipped = page_x - tip.offsetWidth - 16;
  tip.style.left = `${page_x + 16 > room && flipped > 8 ? flipped : Math.max(8, Math.min(page_x + 16, room))}px`;
  const below = page_y + 18, fits_below = below + tip.offsetHeight < scrollY + innerHeight;
  tip.style.top = `${fits_below ? below : Math.max(scrollY + 4, page_y - tip.offsetHeight - 14)}px`;
}

function hide_tip() {
  by_id("tip").hidden = true;
  svg.querySelector(".hair")?.remove();
}

// Wiring -------------------------------------------------------------------------------------------------------------

let announcement = 0;

function announce() {
  clearTimeout(announcement);
  const { plan, seq_len } = shown;
  const text = plan.choice
    ? `${whole(seq_len)} tokens fit: ${memory_text(plan.choice.peak.total)} with ${plan.choice.method}.`
    : `${whole(seq_len)} tokens do not fit; the longest is ${whole(plan.best.seq_len)}.`;
  announcement = setTimeout(() => { by_id("announce").textContent = text; }, 500);
}

function update() {
  const settings = read_controls();
  for (const radio of form.zero) radio.disabled = !(form.gpus.valueAsNumber > 1);
  hide_tip();
  document.body.classList.toggle("stale", settings === null);
  if (settings === null) return;
  const slider = by_id("T-slider");
  slider.value = Math.log2(settings.seq_len);
  slider.setAttribute("aria-valuetext", `${whole(settings.seq_len)} tokens`);
  const found = evaluate(settings);
  if (found === null) {
    document.body.classList.add("stale");
    by_id("problem").textContent = "These saves were not counted with this offload.";
    return;
  }
  shown = found;
  for (const show of [show_head, show_verdict, show_levers, draw_chart, show_methods, show_left_out, show_phases, show_modules, announce]) show();
  write_hash();
}

function set_length(tokens) {
  form.T.value = whole(tokens);
  update();
}

/** Where a browser keeps the clipboard from files, the text is left selected. */
async function copy_code() {
  getSelection().selectAllChildren(by_id("code"));
  try {
    await navigator.clipboard.writeText(by_id("code").textContent);
    by_id("copy").textContent = "Copied";
  } catch {
    by_id("copy").textContent = "Selected";
  }
  setTimeout(() => { by_id("copy").textContent = "Copy"; }, 1500);
}

function start() {
  const { hash } = location;
  fill_controls();
  update(); // so that there is something to show if the address asks for the impossible
  read_hash(hash);
  if (parse_length(form.T.value)) form.T.value = whole(parse_length(form.T.value));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.id === "T-slider") set_length(2 ** event.target.valueAsNumber);
    else update();
  });
  form.addEventListener("reset", () => setTimeout(update));
  form.T.addEventListener("change", () => { if (parse_length(form.T.value)) set_length(parse_length(form.T.value)); });
  by_id("longest").addEventListener("click", () => { if (shown && shown.plan.best.seq_len) set_length(shown.plan.best.seq_len); });
  by_id("step").addEventListener("change", show_phases);
  by_id("copy").addEventListener("click", copy_code);
  svg.addEventListener("pointermove", point_at_chart);
  svg.addEventListener("pointerleave", hide_tip);
  svg.addEventListener("click", (event) => { const tokens = pointed(event); if (tokens) set_length(tokens); });
  addEventListener("hashchange", () => { read_hash(location.hash); update(); });
  addEventListener("resize", () => { if (shown) draw_chart(); });
  update();
}

start();
