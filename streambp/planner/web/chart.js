// Peak memory and seconds against T, and tooltips.

const at_length = (method, tokens) => placed(shown.profile, method, tokens, shown.size, shown.memory, shown.setting)[0].total;

/** Seconds with the fastest chunks that fit; they depend on all settings but T, and are kept until one of those changes. */
const times_kept = { of: "", found: new Map() };

function time_at(method, tokens) {
  const { profile, memory, setting, rates } = shown;
  const all = [...data.profiles.map((one) => one.profile), ...data.unfused];
  const of = JSON.stringify([all.indexOf(profile), memory, setting, rates.name]);
  if (times_kept.of !== of) [times_kept.of, times_kept.found] = [of, new Map()];
  const key = `${method.name} ${tokens}`;
  if (!times_kept.found.has(key)) times_kept.found.set(key, timed(profile, method, tokens, memory, setting, rates).seconds);
  return times_kept.found.get(key);
}

const BYTES = {
  svg, unit: "GiB on each GPU", value: at_length, text: memory_text, every: 8, chosen: (choice) => choice.peak.total,
  label: (bytes) => (bytes < GIB ? (bytes / GIB).toPrecision(3).replace(/\.?0+$/, "") : whole(bytes / GIB)),
  ends() {
    const limit = usable(shown.memory);
    const lowest = Math.min(...shown.rows.map(({ method }) => at_length(method, 2 ** OCTAVES[0])), limit);
    return [2 ** Math.floor(Math.log2(lowest) - 0.15), 2 ** Math.ceil(Math.log2(limit) + 1.6)];
  },
  ticks: ([low, high]) => spaced(Math.log2(low), Math.log2(high), 2),
};
const SECONDS = {
  svg: by_id("times-svg"), unit: "seconds", value: time_at, text: time_text, every: 4, chosen: (choice) => choice.seconds.total,
  label: (spent) => (spent < 1 ? String(Number(spent.toPrecision(1))) : whole(spent)),
  ends() {
    const reach = ({ longest: { seq_len } }) => Math.min(Math.max(seq_len, 2 ** OCTAVES[0]), 2 ** OCTAVES[1]);
    const shortest = Math.min(...shown.rows.map(({ method }) => time_at(method, 2 ** OCTAVES[0])));
    const most = Math.max(...shown.rows.map((row) => time_at(row.method, reach(row))), 8 * shortest);
    return [10 ** (Math.floor(Math.log10(shortest) * 2 - 0.2) / 2), 10 ** (Math.log10(most) + 0.6)];
  },
  ticks: ([low, high]) => spaced(Math.log10(low), Math.log10(high), 10),
};

/** Powers of a base between two exponents, at most nine of them. */
function spaced(low, high, base) {
  const first = Math.ceil(low - 1e-9), every = Math.ceil((Math.floor(high) - first) / 8) || 1, found = [];
  for (let exponent = first; exponent <= high + 1e-9; exponent += every) found.push(base ** exponent);
  return found;
}

/** Where T and values lie, for the figure's width. */
function axes(kind) {
  const width = Math.max(260, kind.svg.parentElement.clientWidth), narrow = width < 560;
  const ends = kind.ends(), ticks = kind.ticks(ends);
  const left = 14 + 7 * Math.max(...ticks.map((value) => kind.label(value).length));
  const box = { left, right: width - 10, top: 24, bottom: narrow ? 252 : 332 };
  const part = (value, low, high) => (Math.log2(value) - Math.log2(low)) / (Math.log2(high) - Math.log2(low));
  return {
    width, narrow, box, ticks,
    x: (tokens) => box.left + part(tokens, 2 ** OCTAVES[0], 2 ** OCTAVES[1]) * (box.right - box.left),
    y: (value) => box.bottom - part(value, ...ends) * (box.bottom - box.top),
  };
}

function curve(kind, method, from, to, { x, y, box }) {
  const lengths = [from], { every } = kind;
  for (let octave = Math.floor(Math.log2(from) * every + 1) / every; 2 ** octave < to; octave += 1 / every) lengths.push(2 ** octave);
  if (to > from) lengths.push(to);
  return lengths.map((tokens) =>
    `${(x(tokens) - box.left).toFixed(1)},${(y(kind.value(method, tokens)) - box.top).toFixed(1)}`).join(" ");
}

function draw_frame(kind, { x, y, box, ticks, narrow, width }) {
  const line = (x1, y1, x2, y2, name) => kind.svg.append(drawn("line", { x1, y1, x2, y2, class: name }));
  const text = (attributes, words) => kind.svg.append(drawn("text", attributes, words));
  for (let octave = OCTAVES[0]; octave <= OCTAVES[1]; octave += 2) {
    line(x(2 ** octave), box.top, x(2 ** octave), box.bottom, "grid");
    if (narrow && (octave - OCTAVES[0]) % 4) continue;
    const anchor = octave === OCTAVES[1] ? "end" : "middle";
    text({ x: x(2 ** octave) + (anchor === "end" ? 4 : 0), y: box.bottom + 17, "text-anchor": anchor }, short_length(2 ** octave));
  }
  for (const value of ticks) {
    line(box.left, y(value), box.right, y(value), "grid");
    text({ x: box.left - 7, y: y(value) + 4, "text-anchor": "end" }, kind.label(value));
  }
  text({ x: 0, y: 12 }, kind.unit);
  text({ x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, "tokens per row, T");
  if (kind !== BYTES) return;
  const limit = usable(shown.memory);
  kind.svg.append(drawn("rect", { x: box.left, y: box.top, width: box.right - box.left, height: y(limit) - box.top, class: "over" }));
  line(box.left, y(limit), box.right, y(limit), "limit");
  text({ x: box.right - 6, y: y(limit) - 7, "text-anchor": "end", class: "limit-label" }, `${memory_text(limit)}${narrow ? "" : " usable"}`);
}

function draw_charts() {
  for (const kind of [BYTES, SECONDS]) draw_chart(kind);
  by_id("curve-note").textContent = "A circle marks the longest sequence that fits, the dot the chosen step; beyond the circle lines are "
    + `pale. Memory is drawn with the smallest chunks, ${whole(shown.size)} tokens, seconds with the fastest that fit. `
    + "Point at a chart to read it, or click to set T.";
}

function draw_chart(kind) {
  const chart = axes(kind), { x, y, box, width } = chart, { rows, seq_len, plan } = shown;
  const [first, last] = OCTAVES.map((octave) => 2 ** octave), height = box.bottom - box.top;
  kind.svg.replaceChildren();
  kind.svg.setAttribute("viewBox", `0 0 ${width} ${box.bottom + 38}`);
  draw_frame(kind, chart);
  const inner = drawn("svg", { x: box.left, y: box.top, width: box.right - box.left, height });
  kind.svg.append(inner);
  for (const { method, longest: reach, chosen } of [...rows].sort((one, other) => one.chosen - other.chosen)) {
    const end = Math.min(Math.max(reach.seq_len, first), last);
    for (const [from, to, beyond] of [[first, end, false], [end, last, true]]) {
      if (to === from || (beyond && reach.seq_len >= last)) continue;
      inner.append(of_method(method, "polyline", {
        points: curve(kind, method, from, to, chart), class: `curve${beyond ? " beyond" : ""}${chosen ? " chosen" : ""}`,
      }));
    }
    if (reach.seq_len < first || reach.seq_len > last) continue;
    kind.svg.append(of_method(method, "circle", { cx: x(reach.seq_len), cy: y(kind.value(method, reach.seq_len)), r: 3.5, class: "end" }));
  }
  kind.svg.append(drawn("rect", { x: box.left, y: box.top, width: box.right - box.left, height, class: "frame" }));
  if (seq_len < first || seq_len > last) return;
  kind.svg.append(drawn("line", { x1: x(seq_len), x2: x(seq_len), y1: box.top, y2: box.bottom, class: "now" }));
  const place = Math.min(Math.max(x(seq_len), 160), width - 50);
  kind.svg.append(drawn("text", { x: place, y: 12, "text-anchor": "middle", class: "now-label" }, `T = ${whole(seq_len)}`));
  if (plan.choice) kind.svg.append(drawn("circle", { cx: x(seq_len), cy: y(kind.chosen(plan.choice)), r: 5.5, class: "dot" }));
}

/** A shape with a method's colour and dashes. */
function of_method(method, name, attributes) {
  const made = drawn(name, { ...attributes, "data-method": method.name });
  made.style.setProperty("--c", colour(shown.profile, method));
  if (name === "polyline") made.style.strokeDasharray = dash(shown.profile, method);
  return made;
}

/** T under the pointer, to a sixteenth of an octave; null outside of the chart. */
function pointed(kind, event) {
  const { box } = axes(kind), place = event.clientX - kind.svg.getBoundingClientRect().left;
  const part = (place - box.left) / (box.right - box.left);
  if (part < 0 || part > 1) return null;
  return Math.round(2 ** (Math.round((OCTAVES[0] + part * (OCTAVES[1] - OCTAVES[0])) * 16) / 16));
}

function point_at_chart(kind, event) {
  const tokens = shown && pointed(kind, event);
  kind.svg.querySelector(".hair")?.remove();
  if (!tokens) return hide_tip();
  const { x, box } = axes(kind);
  kind.svg.append(drawn("line", { x1: x(tokens), x2: x(tokens), y1: box.top, y2: box.bottom, class: "hair" }));
  const lines = shown.rows.map(({ method, longest: reach }) => [
    swatch(method), method.name,
    kind.text(kind.value(method, tokens)) + (tokens > reach.seq_len ? " ✕" : ""),
  ]);
  return show_tip(event.pageX, event.pageY, `${whole(tokens)} tokens (✕: too long)`, lines);
}

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
  for (const { svg: chart } of [BYTES, SECONDS]) chart.querySelector(".hair")?.remove();
}
