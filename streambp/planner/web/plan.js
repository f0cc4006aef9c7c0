// What profile.py and plan.py compute, with their names, in their order of operations: the same numbers to the bit.
"use strict";

function statics(profile, setting) {
  let weights = 0, gradients = 0, optimizer = 0, whole = 0;
  for (const group of profile.groups) {
    const expert = group.name === "expert" ? setting.expert_parallel : 1;
    const replicas = setting.gpus / expert;
    weights += group.bytes / expert / (setting.zero >= 3 ? replicas : 1);
    const size = setting.gradient_bytes === null ? group.trainable_bytes : group.trainable * setting.gradient_bytes;
    gradients += size / expert / (setting.zero >= 2 ? replicas : 1);
    optimizer += setting.optimizer * group.trainable / expert / (setting.zero >= 1 ? replicas : 1);
    whole += group.bytes;
  }
  if (setting.zero >= 3) weights = Math.min(weights + profile.unsharded, whole);
  let host = setting.optimizer_on_host ? optimizer : 0, here = setting.optimizer_on_host ? 0 : optimizer;
  if (setting.on_host) {
    const { bytes, part } = setting.on_host;
    weights -= freed(setting.on_host);
    host += bytes;
    [host, gradients, here] = [host + part * (gradients + here), (1 - part) * gradients, (1 - part) * here];
  }
  return { weights, gradients, optimizer: here, host };
}

const ULYSSES = "DeepSpeed Ulysses", CONTEXT_PARALLEL = "context parallelism", SHARE = 8;
const FIELDS = { [ULYSSES]: "ulysses", [CONTEXT_PARALLEL]: "context_parallel" };

const ranks_of = (setting) => setting.ulysses * setting.context_parallel;
const split_of = (setting) => (setting.ulysses > 1 ? ULYSSES : setting.context_parallel > 1 ? CONTEXT_PARALLEL : "");
const repeats = (split, ranks) => Math.max(1, ...split.heads.map(([, keys]) => ranks / keys));

function keys_held(split, tokens, setting) {
  if (!split) return 0;
  if (split.by === ULYSSES) return tokens * repeats(split, ranks_of(setting));
  const whole = tokens * ranks_of(setting);
  let found = 0;
  for (const [, keys, size] of split.heads) found = Math.max(found, Math.min(keys * whole, setting.room / size));
  return Math.max(whole, found);
}

/** The methods that these ranks can run; throws an Error that says why they cannot share sequences so. */
function available(profile, setting) {
  const ranks = ranks_of(setting), how = split_of(setting);
  let found = profile.methods.filter((method) => (method.split ? method.split.by : "") === how), repeated = false;
  for (const { split } of found) {
    for (const [queries, keys] of split && how === ULYSSES ? split.heads : []) {
      for (const number of [queries, keys]) {
        if (number % ranks && (number === queries || ranks % number)) {
          throw new RangeError(`${number} attention heads cannot be split over ${ranks} ranks. Choose an sp_size that `
            + "divides the number of heads, and divides or is a multiple of the number of key and value heads.");
        }
      }
      repeated = repeated || keys < ranks;
    }
  }
  found = found.filter((method) => !(repeated && method.saves.includes("kv")));
  if (!found.some((method) => method.chunked)) {
    throw new RangeError(`No streamed step was counted with ${how || "whole sequences on each rank"}.`);
  }
  return profile.methods.filter((method) => found.includes(method) || !method.chunked);
}

function with_room(profile, memory, setting) {
  const kept = statics(profile, setting);
  const free = usable(memory) - kept.weights - kept.optimizer - (setting.accumulate ? kept.gradients : 0);
  return { ...setting, room: Math.max(0, free) / SHARE };
}

function peak(profile, method, seq_len, chunk_size, setting) {
  if (!method.chunked) setting = { ...setting, on_host: null };
  const kept = statics(profile, setting);
  const born = profile.groups.reduce((sum, group) => sum + group.trainable_bytes, 0);
  const part = setting.on_host ? setting.on_host.part : 0;
  const share = born && part < 1 ? kept.gradients / (born * (1 - part)) : 0;
  const tokens = seq_len / ranks_of(setting), chunk = method.chunked ? Math.min(chunk_size, tokens) : 0;
  const step = features(tokens, chunk, keys_held(method.split, tokens, setting), 0);
  const present = setting.accumulate ? kept.gradients : 0;
  const parts = new Map();
  const all = setting.accumulate ? method.accumulating : method.first;
  for (const phase of all) {
    const gradients = present + share * gradients_here(phase, all, setting.on_host);
    const activations = quantity(phase.law, step) - phase.gradients;
    const known = parts.get(phase.name);
    if (!known || gradients + activations > known.sum) {
      parts.set(phase.name, { gradients, activations, sum: gradients + activations });
    }
  }
  let worst = null;
  for (const [name, part] of parts) if (worst === null || part.sum > parts.get(worst).sum) worst = name;
  const base = kept.weights + kept.optimizer;
  const phases = {};
  for (const [name, part] of parts) phases[name] = base + part.sum;
  return {
    total: phases[worst], phase: worst, weights: kept.weights, optimizer: kept.optimizer,
    gradients: parts.get(worst).gradients, activations: parts.get(worst).activations,
    host: quantity(method.host, step, kept.host), phases, parts,
  };
}

const LOOKED_AT = 2048, QUANTITIES = ["products", "forward", "backward", "moved", "dispatches", "out", "back"];

/** `total` and what a law's coefficients give for a step's features. */
const quantity = (law, step, total = 0) => law.reduce((sum, coefficient, place) => sum + coefficient * step[place], total);

function features(tokens, chunk, keys, k_block) {
  const chunks = chunk ? Math.ceil(tokens / chunk) : 0;
  let blocks = 0;
  for (let index = 0; k_block && index < Math.min(chunks, LOOKED_AT); index += 1) {
    const start = index * chunk, stop = Math.min(tokens, (index + 1) * chunk);
    blocks += stop - start >= k_block ? Math.ceil(start / k_block) : Math.ceil(stop / k_block) - 1;
  }
  if (k_block && chunks > LOOKED_AT) blocks = (chunks - 1) * (chunks * chunk / k_block / 2);
  return [1, tokens, chunk, chunks, keys, tokens * chunks, tokens * chunk, tokens * tokens, blocks, chunk * blocks];
}

function work(method, seq_len, chunk_size, setting) {
  const ranks = ranks_of(setting);
  const chunk = method.chunked ? Math.min(method.split ? chunk_size : chunk_size * ranks, seq_len) : 0;
  const step = features(seq_len, chunk, 0, method.work.length ? method.work[0].k_block : 0);
  const found = new Map(method.work.map((part) => [part.name, Object.fromEntries(QUANTITIES.map((name, place) =>
    [name, Math.max(0, quantity(part.laws[place], step), part.floors.length ? quantity(part.floors[place], step) : 0)]))]));
  if (method.split) for (const part of found.values()) part.dispatches /= ranks;
  return found;
}

function exchanged(split, seq_len, setting) {
  const ranks = ranks_of(setting);
  if (split.by === ULYSSES) {
    const tokens = seq_len / ranks, times = repeats(split, ranks);
    return { waited: (split.traded + split.traded_keys * times) * tokens, gathered: 0, groups: 1, moved: split.moved * times * tokens };
  }
  let groups = 1;
  for (const [, keys, size] of split.heads) {
    const at_once = Math.max(1, Math.min(keys, Math.floor(setting.room / (size * seq_len))));
    groups = Math.max(groups, Math.ceil(keys / at_once));
  }
  const gathered = groups > 1 ? split.gathered : split.gathered_at_once;
  return { waited: split.summed * seq_len, gathered: gathered * seq_len, groups, moved: split.moved * seq_len };
}

function link_bytes(method, seq_len, setting) {
  if (!method.split) return 0;
  const found = exchanged(method.split, seq_len, setting), ranks = ranks_of(setting);
  return (found.waited + found.gathered) * (ranks - 1) / ranks;
}

function exchange_seconds(method, seq_len, setting, rates, attention) {
  if (!method.split) return 0;
  const found = exchanged(method.split, seq_len, setting), ranks = ranks_of(setting);
  const near = Math.min(ranks, rates.node), order = found.moved / rates.bandwidth;
  if (method.split.by === ULYSSES) {
    const [inside, outside] = [near - 1, ranks - near].map((part) => found.waited * part / ranks);
    return Math.max(inside / rates.peers, outside / rates.network) + order;
  }
  const rate = ranks <= rates.node ? rates.peers : Math.min(rates.peers, rates.node * rates.network);
  const [gathers, sums] = [found.gathered, found.waited].map((size) => size * (ranks - 1) / ranks / rate);
  const others = 1 - 1 / found.groups;
  return sums + gathers / found.groups + others * Math.max(0, gathers - attention) + order;
}

function flops(method, seq_len, chunk_size, setting) {
  let total = 0;
  for (const part of work(method, seq_len, chunk_size, setting).values()) total += part.products + part.forward + part.backward;
  return total;
}

function seconds(method, seq_len, chunk_size, rates, setting) {
  const ranks = ranks_of(setting), phases = {};
  let total = 0, products = 0, attention = 0, elementwise = 0, waiting = 0;
  const step = with_copies(work(method, seq_len, chunk_size, setting), method.chunked ? setting.on_host : null);
  for (const [name, part] of step) {
    const product = part.products / ranks / rates.products;
    const attended = part.forward / ranks / rates.forward + part.backward / ranks / rates.backward;
    const moved = part.moved / ranks / rates.bandwidth, busy = product + attended + moved;
    phases[name] = Math.max(busy, Math.max(part.out, part.back) / ranks / rates.link, part.dispatches * rates.dispatch);
    products += product;
    attention += attended;
    elementwise += moved;
    waiting += phases[name] - busy;
    total += phases[name];
  }
  const exchange = exchange_seconds(method, seq_len, setting, rates, attention);
  return { total: total + exchange, products, attention, elementwise, waiting, phases, exchange };
}

function throughput(spent, seq_len, batch_size, setting) {
  return seq_len * batch_size * (setting.gpus / ranks_of(setting)) / spent.total;
}

function usable(memory) {
  return memory.gpu * (1 - memory.reserve);
}

function fits(at, memory) {
  return at.total <= usable(memory) && (memory.host === null || at.host <= memory.host);
}

function chunk_sizes(batch_size) {
  const in_one_pass = (size) => 1 << (31 - Math.clz32(size));
  return [...new Set(data.chunk_tokens.map((tokens) => in_one_pass(Math.max(1, Math.floor(tokens / batch_size)))))];
}

function counts_chunks(method) {
  return [method.host, ...[...method.first, ...method.accumulating].map((phase) => phase.law)].some((law) => law[3] > 0);
}

function longest(profile, method, memory, setting, only) {
  const sizes = only === undefined ? chunk_sizes(profile.batch_size) : [only];
  const found = (counts_chunks(method) ? sizes : sizes.slice(-1)).map((size) => longest_with(profile, method, memory, setting, size));
  return found.reduce((one, other) => (other.seq_len > one.seq_len ? other : one));
}

function longest_with(profile, method, memory, setting, size) {
  setting = with_room(profile, memory, setting);
  const ranks = ranks_of(setting);
  const at = (tokens) => placed(profile, method, ranks * tokens, size, memory, setting)[0];
  let low = 0, high = Math.floor(data.longest / ranks);
  while (low < high) {
    const middle = Math.floor((low + high + 1) / 2);
    if (fits(at(middle), memory)) low = middle;
    else high = middle - 1;
  }
  const beyond = at(low + 1);
  return { method: method.name, seq_len: ranks * low, binds: beyond.total > usable(memory) ? beyond.phase : "host memory" };
}

/** A step's peak, and the setting with the layers whose weights are on the host: with "auto" as few as it takes to fit, or none. */
function placed(profile, method, seq_len, chunk_size, memory, setting) {
  const resident = { ...setting, on_host: null };
  if (!setting.on_host || !method.chunked) return [peak(profile, method, seq_len, chunk_size, resident), resident];
  let used = setting;
  if (setting.weights === "auto") {
    const at = peak(profile, method, seq_len, chunk_size, resident), lacking = at.total - usable(memory);
    if (lacking <= 0) return [at, resident];
    used = { ...setting, on_host: fewest(profile.frozen, lacking, profile.decoded) };
  }
  return [peak(profile, method, seq_len, chunk_size, used), used];
}

/** Every method with every chunk size, or with one chunk where it is not cut; `only`: with chunks of that size. */
function options(profile, methods, seq_len, memory, setting, rates, only) {
  setting = with_room(profile, memory, setting);
  return methods.flatMap((method) => {
    const sizes = !method.chunked ? [seq_len] : only === undefined ? chunk_sizes(profile.batch_size) : [only];
    return [...new Set(sizes.map((size) => Math.min(size, seq_len)))].map((size) => {
      const { name, saves, offload } = method;
      const [at, used] = placed(profile, method, seq_len, size, memory, setting);
      return {
        method: name, saves, offload, chunk_size: size, seq_len, peak: at,
        flops: flops(method, seq_len, size, setting), seconds: seconds(method, seq_len, size, rates, used),
        gpu_memory: method.prefix_on_host ? Math.max(1, Math.trunc(usable(memory) - at.total)) : null,
        link: link_bytes(method, seq_len, setting), on_host: used.on_host, hidden_from: null,
      };
    });
  });
}

function fitting_options(profile, methods, seq_len, memory, setting, rates, only) {
  return options(profile, methods, seq_len, memory, setting, rates, only).filter((one) => fits(one.peak, memory));
}

function choose(profile, methods, seq_len, memory, setting, rates, only) {
  return fastest_of(fitting_options(profile, methods, seq_len, memory, setting, rates, only));
}

/** The first with the least order; null if there is none. */
function least(found, order) {
  let best = null;
  for (const one of found) {
    const [mine, theirs] = [order(one), order(best || one)];
    const differs = mine.findIndex((part, place) => part !== theirs[place]);
    if (!best || (differs >= 0 && mine[differs] < theirs[differs])) best = one;
  }
  return best;
}

function fastest_of(found) {
  const fastest = Math.min(...found.map((one) => one.seconds.total));
  const ratio = (one) => (fastest ? Number((one.seconds.total / fastest).toFixed(2)) : 1);
  return least(found, (one) => [ratio(one), one.peak.host, -one.chunk_size]);
}

function safest_of(found) {
  const bar = (1 + data.slower) * Math.min(...found.map((one) => one.seconds.total));
  return least(found.filter((one) => one.seconds.total <= bar), (one) => [one.peak.total, one.seconds.total]);
}

function timed(profile, method, seq_len, memory, setting, rates, only) {
  setting = with_room(profile, memory, setting);
  const choice = choose(profile, [method], seq_len, memory, setting, rates, only);
  const size = choice ? choice.chunk_size : Math.min(only === undefined ? chunk_sizes(profile.batch_size).at(-1) : only, seq_len);
  const [at, used] = choice ? [choice.peak] : placed(profile, method, seq_len, size, memory, setting);
  const spent = choice ? choice.seconds : seconds(method, seq_len, size, rates, used), { total } = at;
  return {
    method: method.name, chunk_size: method.chunked ? size : seq_len, fits: choice !== null, peak: total, seconds: spent.total,
    tokens_per_second: throughput(spent, seq_len, profile.batch_size, setting),
  };
}

function next_fastest(profile, times, choice) {
  const streamed = (one) => profile.methods.find((method) => method.name === one.method).chunked;
  return times.filter((one) => one.fits && streamed(one) && !(choice && one.method === choice.method))
    .sort((one, other) => one.seconds - other.seconds).slice(0, 2);
}

function levers(profile, now, memory, setting, only) {
  const options = [];
  if (setting.optimizer && !setting.optimizer_on_host) {
    options.push(["optimizer state on the host", { ...setting, optimizer_on_host: true }, memory]);
  }
  const moved = with_weights_on_host(profile, { ...setting, weights: "cpu" });
  if (moved && !setting.on_host) options.push(["weights on the host (weights='cpu')", moved, memory]);
  if (memory.host !== null) options.push(["twice the host memory", setting, { ...memory, host: 2 * memory.host }]);
  if (setting.gpus > 1 && setting.zero < 3) {
    options.push([`ZeRO-3 over the ${setting.gpus} GPUs`, { ...setting, zero: 3 }, memory]);
  }
  const more = { ...setting, gpus: 2 * setting.gpus, zero: 3, on_host: null };
  const halved = { ...memory, host: memory.host === null ? null : Math.floor(memory.host / 2) };
  const how = split_of(setting);
  if (how) {
    const wider = { ...setting, gpus: 2 * setting.gpus, [FIELDS[how]]: 2 * ranks_of(setting) };
    try {
      available(profile, wider);
      options.push([`sequences over ${ranks_of(wider)} ranks`, wider, halved]);
    } catch { /* these ranks cannot share heads */ }
  }
  options.push([`${more.gpus} GPUs with ZeRO-3`, more, halved]);
  options.push(["GPUs with twice the memory", setting, { ...memory, gpu: 2 * memory.gpu }]);
  return options
    .map(([change, other, budget]) => {
      const chunked = available(profile, other).filter((method) => method.chunked);
      const seq_len = Math.max(...chunked.map((method) => longest(profile, method, budget, other, only).seq_len));
      return { change, seq_len, setting: other, memory: budget };
    })
    .filter((lever) => lever.seq_len > 1.05 * now);
}

/** The setting, with all layers' weights on the host where they may be there. */
function where_weights_may_be(profile, setting) {
  const moved = with_weights_on_host(profile, setting);
  return moved && setting.weights !== "device" ? moved : { ...setting, on_host: null };
}

/** Of all methods the fastest step that fits, with weights on the host where they may be there and a method needs it. */
function plan_profile(profile, seq_len, memory, asked, rates, only) {
  const setting = where_weights_may_be(profile, asked);
  const methods = available(profile, setting), chunked = methods.filter((method) => method.chunked);
  const table = methods.map((method) => longest(profile, method, memory, setting, only));
  const streamed = table.filter((row) => chunked.some((method) => method.name === row.method));
  const best = streamed.reduce((one, other) => (other.seq_len > one.seq_len ? other : one));
  const length = seq_len === "max" ? best.seq_len : seq_len;
  const fitting = length ? fitting_options(profile, chunked, length, memory, setting, rates, only) : [];
  let choice = fastest_of(fitting);
  if (choice && choice.on_host) {
    const method = chunked.find(({ name }) => name === choice.method), used = { ...setting, on_host: choice.on_host };
    choice = { ...choice, hidden_from: hides_from(method, choice.chunk_size, rates, used) };
  }
  const times = length ? methods.map((method) => timed(profile, method, length, memory, setting, rates, only)) : [];
  return {
    seq_len: length, choice, safest: safest_of(fitting), best, binds: best.binds, longest: table,
    levers: levers(profile, best.seq_len, memory, setting, only),
    times, next_fastest: next_fastest(profile, times, choice), setting,
  };
}
