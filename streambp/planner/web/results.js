// Verdict, levers, methods, phases and modules.

const KINDS = ["weights", "optimizer", "gradients", "activations"];
const PARTS = { products: "Matrix products", attention: "Attention", elementwise: "Other kernels", waiting: "Waiting for copies or the host", exchange: "Exchanges that are not hidden" };
let shown = null; // what the page shows now, as `evaluate` found it

function show_head() {
  const { profile } = shown;
  const sum = (field) => profile.groups.reduce((total, group) => total + group[field], 0);
  const trained = sum("trainable") === sum("parameters") ? "all trained" : `${count_text(sum("trainable"))} trained`;
  const rows = profile.batch_size > 1 ? `${profile.batch_size} rows` : "1 row";
  by_id("name").textContent = data.name;
  document.title = `${data.name}: plan`;
  by_id("about").textContent = [
    profile.model, `${count_text(sum("parameters"))} parameters, ${trained}`, profile.dtype, `${profile.layers} layers`,
    `${rows} a step on each GPU`,
  ].join(" · ");
}

function show_verdict() {
  const { plan, seq_len, memory, closest, profile, setting, rates } = shown, { choice, best } = plan;
  const card = by_id("verdict"), limit = usable(memory), at = choice ? choice.peak : closest.at;
  card.dataset.fits = choice ? "yes" : "no";
  const short = at.total > limit ? `needs ${memory_text(at.total)} of the GPU` : `needs ${memory_text(at.host)} of host memory`;
  by_id("verdict-detail").textContent = choice
    ? `with ${choice.method} in chunks of ${whole(choice.chunk_size)} tokens${ranks_of(setting) > 1 ? ` on each of ${ranks_of(setting)} ranks` : ""}${weights_text(choice)}.`
    : `${closest.method.name}, which comes closest, ${short}.`;
  const work = choice ? choice.flops : closest.flops;
  const spent = choice ? choice.seconds : closest.spent, speed = throughput(spent, seq_len, profile.batch_size, setting);
  by_id("verdict-title").textContent = choice
    ? `${whole(seq_len)} tokens fit: ${time_text(spent.total)} a step, ${whole(speed)} tokens/s`
    : `${whole(seq_len)} tokens do not fit`;
  const host_limit = memory.host === null ? "no limit" : `of ${memory_text(memory.host)}`;
  const cells = [
    ["Peak per GPU", gib("peak", at.total), `of ${memory_text(limit)} usable`],
    ["Host per GPU", gib("host", at.host), host_limit],
    ["Longest that fits", figure("longest", best.seq_len, whole(best.seq_len)), "tokens"],
    ["A step", figure("seconds", spent.total, time_text(spent.total)), `on ${rates.name}${rates.guess ? ", guessed" : ""}${setting.gpus > 1 ? ", not measured on several GPUs" : ""}`],
    ["Throughput", figure("tokens_per_second", speed, whole(speed)), "tokens/s"],
    ...(split_of(setting) ? [["To other ranks", gib("link", link_bytes(choice ? profile.methods.find(({ name }) => name === choice.method)
      : closest.method, seq_len, setting)), "a step, each GPU"]] : []),
    ["Arithmetic", figure("flops", work, `${work_text(work)} PFLOP`), "a step"],
  ];
  by_id("figures").replaceChildren(...cells.map(([term, value, small]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, value, element("small", {}, small)))));
  by_id("longest").disabled = !best.seq_len;
  show_parts(spent);
  by_id("code-box").hidden = !choice;
  by_id("door-field").hidden = !choice;
  const pieces = choice ? doors_text(choice, setting)[by_id("door").value].split(/(?<=[({,])/) : [];
  by_id("code").replaceChildren(...pieces.flatMap((piece) => [piece, element("wbr")]));
  const tera = (rate) => (rate / 1e12).toPrecision(3);
  by_id("rates").textContent = `${tera(rates.products)} TFLOP/s in products, ${tera(rates.forward)} and ${tera(rates.backward)} `
    + `in attention, ${tera(rates.bandwidth)} TB/s; forward and backward, no optimizer.`;
  by_id("usable").textContent = `${memory_text(limit)} usable: ${Math.round(100 * memory.reserve)} % is left alone.`;
}

/** Layers whose frozen weights live on the host, and from where on their copies take no time. */
function weights_text({ on_host, hidden_from }) {
  if (!on_host) return "";
  const hidden = hidden_from === null ? "their copies take longer than the layers" : `their copies hide from ${whole(hidden_from)} tokens on`;
  return `; weights of ${on_host.layers} of ${on_host.of} layers on the host, ${memory_text(on_host.bytes)}: ${hidden}`;
}

/** What a step's seconds go into. */
function show_parts(spent) {
  const parts = Object.entries(PARTS).filter(([name]) => spent[name] > 0.0005 * spent.total);
  let left = 0;
  by_id("parts-bar").replaceChildren(...parts.map(([name]) => {
    const width = 100 * spent[name] / spent.total;
    left += width;
    return element("span", { class: "kind", style: `--c: var(--${name}); left: ${left - width}%; width: ${width}%` });
  }));
  by_id("parts").replaceChildren(...parts.map(([name, text]) => element("li", { style: `--c: var(--${name})` },
    element("i"), `${text} `, element("b", {}, figure(`seconds of ${name}`, spent[name], time_text(spent[name]))))));
}

/** A list's row: what, a figure with words, and a button that applies it. */
function offer(what, text, run) {
  const apply = element("button", { type: "button", "aria-label": `Apply: ${what}` }, "Apply");
  apply.addEventListener("click", () => {
    run();
    by_id("verdict-title").scrollIntoView({ block: "nearest" });
  });
  return element("li", {}, element("span", {}, what), element("span", {}, ...text), apply);
}

function show_next() {
  const found = next_fastest(shown.profile, shown.rows.map((row) => ({
    method: row.method.name, fits: row.fits, seconds: row.spent.total, row,
  })), shown.plan.choice);
  const { choice, safest } = shown.plan, saving = safest && safest.peak.total <= 0.95 * choice.peak.total;
  by_id("next-title").hidden = !found.length && !saving;
  by_id("next-title").textContent = "Other settings that fit:";
  by_id("next-fastest").replaceChildren(...found.map(({ method, seconds: spent, row }, place) =>
    offer(method, [figure(`next ${place}`, spent, time_text(spent)), `, ${memory_text(row.at.total)}`],
      () => apply_setting(method, row.chunk_size))));
  if (saving) {
    const method = shown.profile.methods.find(({ name }) => name === safest.method);
    by_id("next-fastest").append(offer(`Safest: ${method.name}`,
      [gib("safest", safest.peak.total), ` in ${time_text(safest.seconds.total)}`], () => apply_setting(method, safest.chunk_size)));
  }
}

function show_levers() {
  const { plan, memory } = shown;
  const trainings = data.profiles.flatMap(({ training }, index) => {
    if (index === Number(form.training.value)) return [];
    const profile = profile_of(index), setting = where_weights_may_be(profile, shown.setting), chunked = available(profile, setting).filter((method) => method.chunked);
    const seq_len = Math.max(...chunked.map((method) => longest(profile, method, memory, setting).seq_len));
    return seq_len > 1.05 * plan.best.seq_len ? [{ change: `train ${training}`, seq_len, setting, memory, index }] : [];
  });
  const found = [...trainings, ...plan.levers];
  by_id("binds").replaceChildren(
    plan.best.seq_len ? "Longer sequences run out of " : "Not even one token fits. It runs out of ",
    element("strong", { "data-key": "binds", "data-value": plan.binds }, binds_text(plan.binds)),
    ` first.${found.length ? ` These ${plan.best.seq_len ? "allow longer ones" : "help"}:` : ""}`);
  by_id("levers").replaceChildren(...found.map((lever) => offer(
    lever.change[0].toUpperCase() + lever.change.slice(1), ["up to ", figure(`lever ${lever.change}`, lever.seq_len, whole(lever.seq_len)), " tokens"], () => {
      if (lever.index !== undefined) form.training.value = lever.index;
      for (const name of ["gpus", "ulysses", "context_parallel"]) form[name].value = lever.setting[name];
      form.zero.value = lever.setting.zero;
      form.on_host.checked = lever.setting.optimizer_on_host;
      form.weights.value = lever.setting.weights;
      form.gpu.value = lever.memory.gpu / GIB;
      if (lever.memory.host !== null) form.host.value = (lever.memory.host * lever.setting.gpus) / GIB;
      update();
    })));
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
  const { rows, seq_len, memory, profile, setting } = shown, limit = usable(memory);
  by_id("peak-head").textContent = `Peak at ${whole(seq_len)}`;
  by_id("methods").tBodies[0].replaceChildren(...rows.map((one) => {
    const { method, at, longest: reach, chosen, offered, spent, fits: fitting } = one;
    const speed = throughput(spent, seq_len, profile.batch_size, setting);
    const label = element("th", { scope: "row" }, swatch(method), method.name);
    if (chosen) label.append(element("span", { class: "tag" }, "chosen"));
    const cell = (name, over, ...content) =>
      element("td", { "data-label": name, ...(over && { class: "over-limit" }) }, ...content);
    const key = method.name;
    const row = element("tr", { class: chosen ? "chosen" : offered ? "" : "other" }, label,
      cell("peak", at.total > limit, gib(`peak ${key}`, at.total)),
      cell("host", memory.host !== null && at.host > memory.host, gib(`host ${key}`, at.host)),
      cell("seconds", !fitting, figure(`seconds ${key}`, spent.total, time_text(spent.total))),
      cell("tokens/s", !fitting, figure(`tokens_per_second ${key}`, speed, whole(speed))),
      cell("longest", false, figure(`longest ${key}`, reach.seq_len, whole(reach.seq_len))),
      cell("stopped by", false, binds_text(reach.binds).replace(" memory,", ",")));
    row.addEventListener("pointerenter", () => light(method.name));
    row.addEventListener("pointerleave", () => light(null));
    return row;
  }));
}

function show_left_out() {
  const { left_out, mixers } = shown.profile;
  const notes = left_out.length ? [`Not counted: ${left_out.join("; ")}`] : [];
  if (mixers) notes.unshift(`Recurrent and convolutional layers: assuming ${mixers}`);
  by_id("left-out").textContent = notes.join(". ");
}

function light(name) {
  for (const chart of document.querySelectorAll("figure > svg")) {
    chart.classList.toggle("dim", name !== null);
    for (const line of chart.querySelectorAll("[data-method]")) line.classList.toggle("lit", line.dataset.method === name);
  }
}

function show_phases() {
  const { rows, plan, profile, seq_len, setting, memory, closest } = shown, select = by_id("step");
  const options = [["", `the ${plan.choice ? "chosen" : "closest"} method`], ...rows.map(({ method }) => [method.name, method.name])];
  const wanted = options.some(([value]) => value === select.value) ? select.value : "";
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = wanted;
  const row = rows.find(({ method }) => method.name === wanted) || rows.find(({ chosen }) => chosen) || closest;
  const { chunk_size } = row;
  const { at } = row, limit = usable(memory);
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
      element("td", {}, figure(`parameters ${rows.length}`, node.parameters, node.parameters ? count_text(node.parameters) : "–")),
      element("td", {}, figure(`activation ${rows.length}`, node.activation, node.activation ? (node.activation / 1024).toFixed(1) : "–"))));
    for (const child of node.children) add(child, depth + 1);
  };
  add(shown.profile.tree, 0);
  by_id("modules").parentElement.hidden = rows.length < 2;
  by_id("modules").tBodies[0].replaceChildren(...rows);
}
