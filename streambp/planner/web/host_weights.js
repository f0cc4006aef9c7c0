// What host_weights.py computes, to the bit: weights of a model's first layers on the host.
"use strict";

const SLOTS = 2, MOVED = ", weights from the host", MOST_TOKENS = 2 ** 24, HEAD_BACKWARD = "head backward";

const sum_of = (values) => values.reduce((total, size) => total + size, 0);

/** The first layers of those whose weights have these sizes; `decoded` bytes of one layer's 4-bit weights. */
function first_layers(sizes, layers, decoded) {
  const found = sizes.slice(0, layers), bytes = sum_of(found), last = sum_of(found.slice(-SLOTS));
  return { layers, of: sizes.length, bytes, last, largest: Math.max(0, ...found), decoded, trained: 0, part: 0 };
}

/** Bytes of the device that they leave: two layers are there at a time. */
const freed = (on_host) => on_host.bytes - SLOTS * on_host.largest - on_host.decoded;

/** Of the gradients that a phase has found and made the bytes on the device; the head's came first. */
function gradients_here(phase, phases, on_host) {
  if (!on_host || !on_host.part) return phase.gradients;
  const head = phases.find(({ name }) => name === HEAD_BACKWARD), of_head = head ? head.gradients : 0;
  const others = Math.min(phase.gradients, Math.max(of_head, phase.gradients - on_host.trained));
  return others + Math.min(phase.gradients - others, SLOTS * on_host.largest);
}

/** As few of the first layers as leave the device so many bytes more; all of them where no number does. */
function fewest(sizes, lacking, decoded) {
  for (let layers = 1; layers < sizes.length; layers += 1) {
    const on_host = first_layers(sizes, layers, decoded);
    if (freed(on_host) >= lacking) return on_host;
  }
  return first_layers(sizes, sizes.length, decoded);
}

/** The setting with all layers' frozen weights on the host, and those that train where it wants all weights there; null
 * where there are none, or several GPUs. */
function with_weights_on_host(profile, setting) {
  let sizes = profile.frozen, trained = 0;
  if (setting.weights === "cpu" && profile.trained.length) {
    sizes = sizes.map((size, index) => Math.max(size, profile.trained[index]));
    trained = sum_of(profile.trained);
  }
  if (setting.gpus > 1 || !sizes.some((size) => size > 0)) return null;
  const born = sum_of(profile.groups.map((group) => group.trainable_bytes));
  const part = Math.min(1, trained / Math.max(1, born));
  return { ...setting, on_host: { ...first_layers(sizes, sizes.length, profile.decoded), trained, part } };
}

/** A step's work by kind of phase, that of layers whose weights come from the host apart. */
function with_copies(step, on_host) {
  const found = new Map(step);
  if (!on_host) return found;
  const part = on_host.layers / on_host.of;
  const times = (work, share) => Object.fromEntries(Object.entries(work).map(([name, amount]) => [name, share * amount]));
  const copies = [["forward", on_host.bytes, 0], ["backward", on_host.bytes - on_host.last, on_host.trained]];
  for (const [name, back, out] of copies) {
    found.set(name, times(step.get(name), 1 - part));
    const moved = times(step.get(name), part);
    found.set(name + MOVED, { ...moved, back: moved.back + back, out: moved.out + out });
  }
  return found;
}

/** The fewest tokens a row from which the copies hide behind the kernels; null: they never do. */
function hides_from(method, chunk_size, rates, setting) {
  const is_hidden = (tokens) => {
    const step = with_copies(work(method, tokens, Math.min(chunk_size, tokens), setting), setting.on_host);
    return [...step].filter(([name]) => name.endsWith(MOVED)).every(([, part]) => {
      const attended = part.forward / rates.forward + part.backward / rates.backward;
      const busy = part.products / rates.products + attended + part.moved / rates.bandwidth;
      return part.back / rates.link <= Math.max(busy, part.dispatches * rates.dispatch);
    });
  };
  if (!is_hidden(MOST_TOKENS)) return null;
  let low = 1, high = MOST_TOKENS;
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (is_hidden(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** StreamConfig's field. */
const weights_field = (on_host) => (on_host.layers === on_host.of ? "cpu" : "auto");
