// The controls, and what they say.

const OCTAVES = [10, 24]; // log2 of the shortest and the longest T of the slider and of the chart
const form = by_id("controls");

/** What a method offloads, as the control has it. */
const offloads = (method) => (method.prefix_on_host ? `${method.offload}, keys` : method.offload);

function fill_controls() {
  const start = data.setting;
  const fill = (select, pairs, chosen) =>
    select.replaceChildren(...pairs.map(([value, text]) => {
      const option = element("option", { value }, text);
      option.defaultSelected = String(value) === String(chosen);
      return option;
    }));
  fill(form.training, data.profiles.map(({ training }, index) => [index, training]), 0);
  by_id("training-field").hidden = data.profiles.length < 2;
  const sizes = { 12: "12 B: Adam, float32 weights", 8: "8 B: Adam in float32", 4: "4 B: Adam in bf16", 0: "none" };
  if (!(start.optimizer in sizes)) sizes[start.optimizer] = `${start.optimizer} B a parameter`;
  fill(form.optimizer, Object.entries(sizes).sort(([a], [b]) => b - a), start.optimizer);
  const places = { auto: "on the GPU if they fit", device: "on the GPU", cpu: "on the host" };
  fill(form.weights, Object.entries(places), start.weights);
  by_id("weights-field").hidden = !data.profiles.some(({ profile }) => with_weights_on_host(profile, { gpus: 1, weights: "cpu" }));
  const chunked = data.profiles[0].profile.methods.filter((method) => method.chunked);
  for (const field of Object.values(FIELDS)) form[field].defaultValue = start[field];
  by_id("ranks").hidden = !chunked.some((method) => method.split);
  form.fused.defaultChecked = true;
  by_id("fused-field").hidden = !data.unfused.length;
  const choices = (values, words) => [["auto", "best"], ...[...new Set(values)].map((value) => [value, words[value] || value])];
  fill(form.saves, choices(chunked.map((method) => method.saves.join("+")), { "": "nothing" }), "auto");
  fill(form.offload, choices(chunked.map(offloads), { cpu: "to host", "cpu, keys": "also keys" }), "auto");
  const chunks = chunk_sizes(data.profiles[0].profile.batch_size);
  fill(form.chunk, [["auto", "best"], ...chunks.map((size) => [size, `${whole(size)} tokens`])], "auto");
  fill(form.device, data.devices.map(({ name, guess }) => [name, guess ? `${name} (guessed)` : name]), data.devices[0].name);
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
    else if (control && (!control.options || [...control.options].some((option) => option.value === value))) control.value = value;
  }
}

function write_hash() {
  const names = ["T", "gpu", "host", "gpus", "ulysses", "context_parallel", "zero", "training", "optimizer", "on_host", "weights", "fused"];
  const pairs = [...names, "accumulate", "saves", "offload", "chunk", "device"].map(
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
  const [ulysses, context_parallel] = [form.ulysses.valueAsNumber, form.context_parallel.valueAsNumber];
  by_id("problem").textContent = ulysses > 1 && context_parallel > 1 ? "Ulysses or context parallelism: one of them at a time."
    : gpus % (ulysses * context_parallel) ? `The GPUs must be a multiple of the ${ulysses * context_parallel} ranks of a sequence.` : "";
  if (by_id("problem").textContent) return null;
  const setting = {
    ...data.setting, gpus, ulysses, context_parallel, zero: Number(form.zero.value), optimizer: Number(form.optimizer.value),
    optimizer_on_host: form.on_host.checked, weights: form.weights.value, accumulate: form.accumulate.checked,
  };
  const memory = {
    gpu: Math.floor(form.gpu.valueAsNumber * GIB),
    host: Number.isNaN(host) ? null : Math.floor(Math.floor(host * GIB) / gpus),
    reserve: data.memory.reserve,
  };
  const rates = data.devices.find((device) => device.name === form.device.value);
  return { profile: profile_of(form.training.value), seq_len, setting, memory, rates };
}

/** Of a training, with fused layers or without them. */
const profile_of = (index) => (form.fused.checked || !data.unfused.length ? data.profiles[index].profile : data.unfused[index]);

/** Everything that the page shows; throws a RangeError if these ranks cannot share sequences. */
function evaluate({ profile, seq_len, setting: asked, memory, rates }) {
  const methods = available(profile, asked);
  const { value: saves } = form.saves, { value: offload } = form.offload;
  const only = form.chunk.value === "auto" ? undefined : Number(form.chunk.value);
  const allowed = methods.filter((method) => !method.chunked
    || ((saves === "auto" || saves === method.saves.join("+")) && (offload === "auto" || offload === offloads(method))));
  if (!allowed.some((method) => method.chunked)) return null;
  const size = chunk_sizes(profile.batch_size).at(-1);
  const plan = plan_profile({ ...profile, methods: allowed }, seq_len, memory, asked, rates, only);
  const setting = with_room(profile, memory, plan.setting); // with weights on the host where the plan has them there
  const rows = methods.map((method) => {
    const offered = allowed.includes(method), within = offered ? only : undefined;
    const time = timed(profile, method, seq_len, memory, setting, rates, within);
    const chosen = plan.choice !== null && plan.choice.method === method.name;
    const found = chosen ? plan.choice : choose(profile, [method], seq_len, memory, setting, rates, within);
    const { chunk_size } = found || time, [closest_at, used] = placed(profile, method, seq_len, chunk_size, memory, setting);
    return {
      method, chunk_size, at: found ? found.peak : closest_at, fits: time.fits, chosen,
      spent: found ? found.seconds : seconds(method, seq_len, chunk_size, rates, used), flops: flops(method, seq_len, chunk_size, setting),
      longest: longest(profile, method, memory, setting, within), offered,
    };
  });
  const closest = rows.filter((row) => row.offered && row.method.chunked)
    .reduce((one, other) => (other.longest.seq_len - one.longest.seq_len || one.at.total - other.at.total) > 0 ? other : one);
  const every = options(profile, methods, seq_len, memory, setting, rates);
  return { profile, seq_len, setting, memory, rates, size, plan, rows, closest, every };
}

/** Let the controls say one setting, of a streamed method. */
function apply_setting(name, chunk_size) {
  const method = shown.profile.methods.find((one) => one.name === name);
  form.saves.value = method.saves.join("+");
  form.offload.value = offloads(method);
  form.chunk.value = chunk_sizes(shown.profile.batch_size).findLast((size) => size >= chunk_size) || "auto";
  update();
}
