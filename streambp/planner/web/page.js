// What happens when.

let announcement = 0;

function announce() {
  clearTimeout(announcement);
  const { plan, seq_len } = shown;
  const text = plan.choice
    ? `${whole(seq_len)} tokens fit: ${memory_text(plan.choice.peak.total)} with ${plan.choice.method}, `
      + `${time_text(plan.choice.seconds.total)} a step.`
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
  let found = null, why = "These saves were not counted with this offload.";
  try {
    found = evaluate(settings);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    why = error.message;
  }
  if (found === null) {
    document.body.classList.add("stale");
    by_id("problem").textContent = why;
    return;
  }
  shown = found;
  for (const show of [show_head, show_verdict, show_next, show_levers, draw_frontier, draw_charts, show_methods, show_left_out, show_phases, show_modules]) {
    show();
  }
  announce();
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
    if (event.target.id === "gpu") infer_device();
    if (event.target.id === "T-slider") set_length(2 ** event.target.valueAsNumber);
    else update();
  });
  form.addEventListener("reset", () => setTimeout(update));
  form.T.addEventListener("change", () => { if (parse_length(form.T.value)) set_length(parse_length(form.T.value)); });
  by_id("longest").addEventListener("click", () => { set_length(shown.plan.best.seq_len); });
  by_id("step").addEventListener("change", show_phases);
  by_id("door").addEventListener("change", show_verdict);
  by_id("copy").addEventListener("click", copy_code);
  for (const kind of [BYTES, SECONDS]) {
    kind.svg.addEventListener("pointermove", (event) => point_at_chart(kind, event));
    kind.svg.addEventListener("pointerleave", hide_tip);
    kind.svg.addEventListener("click", (event) => { const tokens = pointed(kind, event); if (tokens) set_length(tokens); });
  }
  addEventListener("hashchange", () => { read_hash(location.hash); update(); });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide_tip(); });
  addEventListener("resize", () => { draw_frontier(); draw_charts(); });
  update();
}

start();
