// Peak against T, and tooltips.

/** Where T and bytes lie, for the figure's width. */
function axes() {
  const width = Math.max(260, by_id("curve").clientWidth), narrow = width < 520;
  const lowest = Math.min(...shown.rows.map(({ method }) => at_length(method, 2 ** OCTAVES[0])), usable(shown.memory));
  const ends = [Math.floor(Math.log2(lowest) - 0.15), Math.ceil(Math.log2(usable(shown.memory)) + 1.6)];
  const left = (narrow ? 42 : 52) + (ends[0] < 27 ? 10 : 0);
  const box = { left, right: width - (narrow ? 8 : 14), top: 24, bottom: (narrow ? 290 : 370) - 38 };
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
    const label = octave < 30 ? (2 ** octave / GIB).toPrecision(3).replace(/\.?0+$/, "") : whole(2 ** octave / GIB);
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
