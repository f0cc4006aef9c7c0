// Memory against seconds at the chosen T: a dot for each setting.

let focused = 0; // the dot that the Tab key reaches; arrows go on to others

/** All settings but those far beyond the GPU, the smallest first, and whether each is faster than every smaller one. */
function settings_by_memory() {
  const near = shown.every.filter((one) => one.peak.total <= 1.5 * usable(shown.memory));
  const sorted = (near.length ? near : shown.every).sort((one, other) => one.peak.total - other.peak.total || one.seconds.total - other.seconds.total);
  let fastest = Infinity;
  return sorted.map((one) => {
    const best = one.seconds.total < fastest;
    if (best) fastest = one.seconds.total;
    return { ...one, best, method: shown.profile.methods.find(({ name }) => name === one.method) };
  });
}

/** Numbers to write at an axis: even steps of 1, 2 or 5 times a power of ten, or powers of two of the first where ends are far apart. */
function marks([low, high]) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 8)), step = [1, 2, 5, 10].find((digit) => digit * power >= (high - low) / 8) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), first = Math.ceil(low / step) * step, found = [];
  for (let value = first; value <= high; value = high / low > 6 ? 2 * value : value + step) found.push([value, Number(value.toFixed(digits))]);
  return found.map(([value, shown_as]) => [value, shown_as.toLocaleString("en-US", { minimumFractionDigits: Math.min(digits, 2) })]);
}

function frontier_axes(found) {
  const width = Math.max(260, by_id("frontier").clientWidth), narrow = width < 560;
  const box = { left: 52, right: width - 12, top: 26, bottom: narrow ? 262 : 322 };
  const sizes = [...found.map((one) => one.peak.total / GIB), usable(shown.memory) / GIB], spent = found.map((one) => one.seconds.total);
  const span = (values, least) => {
    const [low, high] = [Math.min(...values), Math.max(...values)], more = Math.max(least, 0.06 * Math.log(high / low));
    return [low * Math.exp(-more), high * Math.exp(more)];
  };
  const ends = [span(sizes, 0.06), span(spent, 0.03)];
  const part = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
  return {
    width, box, ends, narrow,
    x: (bytes) => box.left + part(bytes / GIB, ends[0]) * (box.right - box.left),
    y: (value) => box.bottom - part(value, ends[1]) * (box.bottom - box.top),
  };
}

function setting_text({ method, chunk_size, peak: at, seconds: spent }) {
  const chunks = method.chunked ? `, chunks of ${whole(chunk_size)}` : ", unpatched";
  const within = fits(at, shown.memory) ? "" : at.total > usable(shown.memory) ? "; too large for the GPU" : "; too large for the host";
  return { title: `${method.name}${chunks}`, text: `${memory_text(at.total)}, ${time_text(spent.total)}${within}` };
}

function draw_frontier() {
  const chart = by_id("frontier-svg"), found = settings_by_memory(), { x, y, box, ends, width, narrow } = frontier_axes(found);
  const held = chart.contains(document.activeElement), limit = usable(shown.memory), { choice } = shown.plan;
  const line = (x1, y1, x2, y2, name) => chart.append(drawn("line", { x1, y1, x2, y2, class: name, "aria-hidden": "true" }));
  const text = (attributes, words) => chart.append(drawn("text", { ...attributes, "aria-hidden": "true" }, words));
  by_id("frontier-title").textContent = `Memory against time at ${whole(shown.seq_len)} tokens`;
  const out = shown.every.length - found.length;
  by_id("frontier-note").textContent = "A dot is a method with a chunk size, in the colours of the table below; filled ones fit, and the line "
    + `joins those that nothing smaller beats.${out ? ` ${out} that ${out > 1 ? "need" : "needs"} far more memory ${out > 1 ? "are" : "is"} left out.` : ""} `
    + "Click a streamed one to choose it, or use Tab, the arrow keys and Enter.";
  chart.replaceChildren();
  chart.setAttribute("viewBox", `0 0 ${width} ${box.bottom + 38}`);
  let written_to = -Infinity;
  for (const [value, label] of marks(ends[0])) {
    const place = x(value * GIB);
    line(place, box.top, place, box.bottom, "grid");
    if (place - written_to < 34) continue;
    text({ x: place, y: box.bottom + 17, "text-anchor": "middle" }, label);
    written_to = place;
  }
  for (const [value, label] of marks(ends[1])) {
    line(box.left, y(value), box.right, y(value), "grid");
    text({ x: box.left - 7, y: y(value) + 4, "text-anchor": "end" }, label);
  }
  text({ x: 0, y: 12 }, "seconds");
  text({ x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, "GiB on each GPU");
  chart.append(drawn("rect", { x: x(limit), y: box.top, width: Math.max(0, box.right - x(limit)), height: box.bottom - box.top, class: "over" }));
  line(x(limit), box.top, x(limit), box.bottom, "limit");
  const left = x(limit) > width / 2;
  text({ x: x(limit) + (left ? -6 : 6), y: 16, "text-anchor": left ? "end" : "start", class: "limit-label" },
    `${memory_text(limit)}${narrow ? "" : " usable"}`);
  const corners = found.filter(({ best }) => best).map((one) => [x(one.peak.total), y(one.seconds.total)]);
  const steps = corners.flatMap(([at, high], place) => (place ? [[at, corners[place - 1][1]], [at, high]] : [[at, high]]));
  chart.append(drawn("polyline", { points: steps.map((pair) => pair.map((one) => one.toFixed(1)).join(",")).join(" "), class: "steps" }));
  chart.append(drawn("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, class: "frame" }));
  focused = Math.min(focused, found.length - 1);
  const dots = found.map((one, place) => dot(one, place, x, y, choice));
  chart.append(...dots.filter((one) => !one.classList.contains("chosen")), ...dots.filter((one) => one.classList.contains("chosen")));
  if (held) dots[focused].focus();
}

/** One setting: a button. Unpatched ones show their phases. */
function dot(one, place, x, y, choice) {
  const { title, text } = setting_text(one), chosen = choice && choice.method === one.method.name && choice.chunk_size === one.chunk_size;
  const inside = fits(one.peak, shown.memory);
  const made = of_method(one.method, "g", {
    class: `setting${inside ? "" : " outside"}${chosen ? " chosen" : ""}`, role: "button", tabindex: place === focused ? 0 : -1,
    "aria-label": `${title}: ${text}`, "aria-pressed": String(Boolean(chosen)), "data-place": place, "data-seconds": one.seconds.total,
    "data-bytes": one.peak.total, "data-chunk": one.chunk_size, "data-best": one.best,
  });
  const [cx, cy] = [x(one.peak.total), y(one.seconds.total)];
  made.append(drawn("circle", { cx, cy, r: 11, class: "reach" }), drawn("circle", { cx, cy, r: chosen ? 7 : 5, class: "mark" }));
  const tell = () => {
    const { left, top } = made.getBoundingClientRect();
    show_tip(left + scrollX + 16, top + scrollY + 16, title, [[swatch(one.method), text, ""]]);
  };
  made.addEventListener("pointerenter", tell);
  made.addEventListener("pointerleave", hide_tip);
  made.addEventListener("focus", () => { focused = place; if (made.matches(":focus-visible")) tell(); });
  made.addEventListener("blur", hide_tip);
  made.addEventListener("click", () => pick(one));
  made.addEventListener("keydown", (event) => move(event, one, place));
  return made;
}

function pick({ method, chunk_size }) {
  if (method.chunked) return apply_setting(method.name, chunk_size);
  by_id("step").value = method.name;
  show_phases();
  return by_id("phases-title").scrollIntoView({ block: "nearest" });
}

/** Arrows go from dot to dot, by memory; Enter and Space choose. */
function move(event, one, place) {
  const dots = [...by_id("frontier-svg").querySelectorAll(".setting")].sort((a, b) => a.dataset.place - b.dataset.place);
  const to = { ArrowRight: place + 1, ArrowUp: place + 1, ArrowLeft: place - 1, ArrowDown: place - 1, Home: 0, End: dots.length - 1 }[event.key];
  const enter = event.key === "Enter" || event.key === " ";
  if (to === undefined && !enter) return;
  event.preventDefault();
  if (enter) pick(one);
  else if (dots[to]) {
    dots[place].setAttribute("tabindex", "-1");
    dots[to].setAttribute("tabindex", "0");
    dots[to].focus();
  }
}
