// A plan's settings as each way into streambp takes them: what doors.py writes.

/** JSON with Python's spaces. */
function python_json(value) {
  if (Array.isArray(value)) return `[${value.map(python_json).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${python_json(part)}`).join(", ")}}`;
}

const ALONE = "not with weights on the host, which take one process";
const IN_BACKWARD = "; streambp.integrations.optimizer_in_backward(model, make, on_host=True) keeps the optimizer there";

function doors_text(choice, setting) {
  const { chunk_size, saves, offload, gpu_memory, on_host } = choice, fields = { chunk_size, saves };
  if (offload !== "none") fields.offload = offload;
  if (gpu_memory !== null) fields.gpu_memory = JSON.parse(written(gpu_memory));
  if (on_host) fields.weights = weights_field(on_host);
  const pairs = Object.entries(fields), all = (text) => pairs.map(([name, value]) => text(name, value));
  const flags = all((name, value) => `--${name.replaceAll("_", "-")}=${Array.isArray(value) ? value.join(",") : value}`);
  let engine = setting.zero ? { zero_optimization: { stage: setting.zero } } : {};
  if (setting.optimizer_on_host) {
    engine = { zero_optimization: { stage: Math.max(2, setting.zero), offload_optimizer: { device: "cpu" } } };
  }
  return {
    Python: config_text(choice),
    launch: `streambp launch ${flags.join(" ")} -- PROGRAM ...`,
    TRL: `StreamSFTConfig(${all((name, value) => `stream_${name}=${python_json(name === "chunk_size" ? String(value) : value)}`).join(", ")})`,
    axolotl: `streambp: {${all((name, value) => `${name}: ${python_json(value)}`).join(", ")}}`,
    DeepSpeed: on_host ? ALONE + (setting.optimizer_on_host ? IN_BACKWARD : "") : python_json({ ...engine, streambp: fields }),
  };
}

/** A usual device with so much memory, where one has: seconds are of that. */
function infer_device() {
  const size = form.gpu.valueAsNumber * GIB;
  const found = Object.entries(data.usual).find(([, usual]) => size >= 0.95 * usual * 1e9 && size <= 1.02 * usual * GIB);
  if (found && data.devices.some(({ name }) => name === found[0])) [form.device.value] = found;
}
