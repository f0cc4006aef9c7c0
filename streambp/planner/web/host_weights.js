// What host_weights.py computes, to the bit: frozen weights of a model's first layers on the host.
"use strict";

const SLOTS = 2, MOVED = ", weights from the host", MOST_TOKENS = 2 ** 24;

/** The first layers of those whose frozen weights have these sizes. */
function first_layers(sizes, layers) {
  const found = sizes.slice(0, layers), sum = (values) => values.reduce((total, size) => total + size, 0);
  return { layers, of: sizes.length, bytes: sum(found), last: sum(found.slice(-SLOTS)), largest: Math.max(0, ...found) };
}

/** Bytes of the device that they leave: two layers are there at a time. */
const freed = (on_host) => on_host.bytes - SLOTS * on_host.largest;

/** As few of the first layers as leave the device so many bytes more; all of them where no number does. */
function fewest(sizes, lacking) {
  for (let layers = 1; layers < sizes.length; layers += 1) {
    const on_host = first_layers(sizes, layers);
    if (freed(on_host) >= lacking) return on_host;
  }
  return first_layers(sizes, sizes.length);
}

/** The setting with all layers' frozen weights on the host; null where there are none, or several GPUs. */
function with_weights_on_host(profile, setting) {
  if (setting.gpus > 1 || !profile.frozen.some((size) => size > 0)) return null;
  return { ...setting, on_host: first_layers(profile.frozen, profile.frozen.length) };
}

/** A step's work by kind of phase, that of layers whose weights come from the host apart. */
function with_copies(step, on_host) {
  const found = new Map(step);
  if (!on_host) return found;
  const part = on_host.layers / on_host.of;
  const times = (work, share) => Object.fromEntries(Object.entries(work).map(([name, amount]) => [name, share * amount]));
  for (const [name, back] of [["forward", on_host.bytes], ["backward", on_host.bytes - on_host.last]]) {
    found.set(name, times(step.get(name), 1 - part));
    const moved = times(step.get(name), part);
    found.set(name + MOVED, { ...moved, back: moved.back + back });
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
