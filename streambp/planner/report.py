"""Format plans and comparisons as text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from streambp.model.record import OUTCOME_UNPATCHED, SavedTensors, size_text
from streambp.offload.costs import GRAPH
from streambp.offload.free_memory import RESERVED_BYTES
from streambp.planner.auto_offload import AutoOffloadStep
from streambp.planner.default_step import DefaultStep
from streambp.planner.host_weights import WEIGHT_SLOTS
from streambp.planner.launch_commands import config_code, launcher_settings, launcher_settings_of
from streambp.planner.measure import PhaseComparison
from streambp.planner.plan import ALLOWED_SLOWDOWN, Choice, Plan
from streambp.planner.profile import Node, Profile, Setting
from streambp.planner.seconds import throughput
from streambp.planner.suggestions import MAX_GPUS, Remedy, excess_text, seconds_of
from streambp.rates import Rates

GIB = 2**30
BAR_COLUMNS = 40
PINNING_SECONDS_PER_GIB = 0.5  # seconds to pin a GiB of host memory
DEFAULT_PATCH_TEXT = 'streambp.patch(model) alone (saves="auto")'
NAMED_SAVES = ("attn_out", "kv", GRAPH)  # saved tensors other than outputs of Linears
CONFIG_CODE_START = "StreamConfig("
PARAGRAPH_COLUMNS = 120  # columns of a paragraph without a terminal
MIN_UNQUANTIZED_BYTES = 1.9  # bytes of a parameter, above which it has not been quantized
MAX_PACKED_BYTES = 0.75  # bytes of a parameter in 4 bits and its scales, at most
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MIN_TERMINAL_COLUMNS = 60  # minimal number of columns; narrower terminals get lines of this width
# numbers of table columns to try for narrow terminals, without the column of limits
COLUMNS_PER_PANE = (5, 4, 3, 2)
# Explanation of the methods' names.
METHOD_NAMES_NOTE = (
    "plain: unpatched. checkpointing: gradient checkpointing. saves: tensors that backward need "
    "not recompute. offload: layer inputs and saves wait in host memory. keys on the host: keys "
    "and values too."
)


def plan_table(
    plan: Plan, modules: bool = True, width: int | None = None, notes: Sequence[str] = ()
) -> str:
    """Return the text that `streambp plan` prints: request, chosen settings, limits of memory, a
    table of methods (ways to run a step), and a chart of a step's memory.

    Args:
        plan: the plan.
        modules: True to add the tree of the model's modules, with parameters and activation bytes.
        width: columns of the terminal; None: do not wrap lines.
        notes: more lines, printed before the chosen settings.
    """
    if width is not None:
        width = max(width, MIN_TERMINAL_COLUMNS)
    if plan.memory.host is None:
        host = "no limit"
    else:
        host = f"{plan.memory.host / GIB:.1f} GiB"
    gpu = f"{plan.memory.gpu / GIB:.1f} GiB, {plan.memory.usable / GIB:.1f} GiB of it usable"
    lines = [headline(plan.profile, plan.setting), f"Each GPU: {gpu}; host memory for each: {host}"]
    lines += [*_notes(plan.profile), *notes]
    lines.append("")
    lines = fold_lines([*lines, *_choice(plan)], width)
    if not any(row.seq_len for row in plan.longest):
        return "\n".join(lines)  # rows of zeros would be useless
    if plan.choice is not None:
        lines += ["", "The same settings elsewhere:"]
        if plan.default_wins:
            ways = launcher_settings_of({}, plan.setting, False)
        else:
            ways = launcher_settings(plan.choice, plan.setting)
        lines += [f"  {door:<10}{text}" for door, text in ways.items()]
    rows = [("longest sequence", "tokens", f"{plan.seq_len:,} tokens: GiB", "seconds", "tokens/s")]
    times = {timed.method: timed for timed in plan.times if timed.fits}
    for row in plan.longest:
        timed = times.get(row.method)
        cells = ("too large", "-", "-")
        if timed is not None:
            seconds_text = duration(timed.seconds).removesuffix(" s")
            cells = (f"{timed.peak / GIB:.1f}", seconds_text, f"{timed.tokens_per_second:,.0f}")
        rows.append((row.method, f"{row.seq_len:,}", *cells))
    stopped = ["stopped by", *(phase_text(row.binds) for row in plan.longest)]
    table = []
    for line, binds in zip(columns(rows), stopped, strict=True):
        table.append(f"{line}  {binds}")
    for pane in COLUMNS_PER_PANE:
        if width is not None and max(map(len, table)) > width:
            table = columns([row[:pane] for row in rows])
    table += [f"not counted: {reason}" for reason in plan.profile.left_out]
    lines += ["", *table, *fold_lines([METHOD_NAMES_NOTE], width or PARAGRAPH_COLUMNS)]
    if plan.choice is not None:
        title = (
            f"Phases of the step ({plan.choice.method}, chunks of {plan.choice.chunk_size:,}), GiB "
            "on each GPU:"
        )
        lines += ["", *fold_lines([title], width)]
        peak = plan.choice.peak
        if width is None:
            long = BAR_COLUMNS
        else:
            long = min(BAR_COLUMNS, width - 40)
        wide = max(len(phase_text(name)) for name in peak.phases)
        # the limit is marked, and bytes beyond the limit have another shade
        for name, total in peak.phases.items():
            length = min(round(long * total / plan.memory.usable), 2 * long)
            bar = "█" * min(length, long)
            lines.append(
                f"{phase_text(name):<{wide}}  {total / GIB:>8.1f}  "
                f"{bar:<{long}}│{'▒' * (length - long)}"
            )
    if modules:
        lines += [
            "",
            "Modules: parameters, and bytes a token that an unpatched forward keeps for backward:",
        ]
        lines += tree_lines(plan.profile.tree)
    return "\n".join(lines)


def _notes(profile: Profile) -> list[str]:
    """Return lines of the plan's text about its assumptions, each only if it applies to the model.

    The lines name assumptions about models that are no causal language models, and the kernels
    assumed for recurrent and convolutional layers. Further lines name Linears without a LoRA
    adapter, and expert weights that are not quantised beside quantised Linears.
    """
    lines = []
    for text in profile.assumed:
        lines.append(f"Assumed: {text}")
    if profile.mixers:
        lines.append(f"Recurrent and convolutional layers: assuming {profile.mixers}")
    if profile.without_adapters:
        names = ", ".join(profile.without_adapters)
        lines.append(
            f"Without adapters: {names}, which peft refuses or the model does not have "
            "(--lora-targets chooses)"
        )
    sizes = {}
    for group in profile.groups:
        frozen = group.parameters - group.trainable
        stored = group.bytes - group.trainable_bytes
        sizes[group.name] = (frozen, stored, stored / max(1, frozen))
    no_parameters = (0, 0, 0.0)
    experts = sizes.get("expert", no_parameters)
    if experts[0] and 0 < sizes.get("dense", no_parameters)[2] <= MIN_UNQUANTIZED_BYTES:
        if experts[2] > MIN_UNQUANTIZED_BYTES:
            lines.append(
                f"{_count(experts[0])} parameters of experts stay in {profile.dtype}, "
                f"{experts[1] / GIB:.1f} GiB: bitsandbytes quantizes Linears, and these experts "
                "are none"
            )
        elif experts[2] <= MAX_PACKED_BYTES:
            unpacked = experts[0] * DTYPE_BYTES.get(profile.dtype, 2) / GIB
            lines.append(
                f"{_count(experts[0])} parameters of experts in 4 bits, by bitsandbytes' "
                "replace_parameter_4bit (docs/how-to/small-cards-mixtures.md). load_in_4bit=True "
                f"alone leaves them in {profile.dtype}, {unpacked:.1f} GiB"
            )
    return lines


def headline(profile: Profile, setting: Setting) -> str:
    """Return the first line of a plan's text: the model's class, numbers of parameters, dtype,
    layers, rows, and the training setting (optimizer, ZeRO, GPUs, sequence sharding)."""
    parameters = sum(group.parameters for group in profile.groups)
    trained = sum(group.trainable for group in profile.groups)
    if trained == parameters:
        share = "all of them trained"
    else:
        share = f"{_count(trained)} trained"
    stored = sum(group.bytes for group in profile.groups) / GIB
    parts = [f"{profile.model}: {_count(parameters)} parameters in {stored:.1f} GiB, {share}, {profile.dtype}, "
             f"{profile.layers} layers"]  # fmt: skip
    parts += [f"{profile.batch_size} rows"] if profile.batch_size > 1 else []
    if setting.optimizer_on_host:
        where = " on the host"
    else:
        where = ""
    parts += [f"{setting.optimizer:g} optimizer bytes a parameter{where}"]
    gpus = "1 GPU" if setting.gpus == 1 else f"{setting.gpus} GPUs"
    parts += [f"ZeRO-{setting.zero} over {gpus}"] if setting.zero else []
    parts += (
        [f"each sequence over {setting.ranks} ranks by {setting.split}"] if setting.split else []
    )
    return "; ".join(parts)


def _choice(plan: Plan) -> list[str]:
    """Return the part of a plan's text about the chosen settings, as lines. The first lines have
    these settings with the step's cost. Further lines have the prediction for `patch(model)`
    without settings (chunk size, saved tensors, peak, seconds), if there is a prediction. The last
    lines name the memory (GPU or host) that longer sequences exceed first, and changes with which
    longer sequences fit. If no step fits, the first line says so."""
    if plan.choice is None:
        reason = excess_text(plan)
        lines = [
            (f"{plan.seq_len:,} tokens do not fit" if plan.seq_len else "Not even one token fits")
            + (f": {reason}." if reason is not None else ".")
        ]
    elif plan.default_wins and plan.by_default is not None:
        lines = [f"{tokens_text(plan.seq_len)}: streambp.patch(model)"]
        lines.append(_default_line(plan, plan.by_default))
        lines.append("  With every setting fixed it is slower:")
        lines += [f"  {line}" for line in _chosen_lines(plan, plan.choice)]
    else:
        lines = _chosen_lines(plan, plan.choice)
    if plan.by_default is not None and not plan.default_wins:
        lines.append(_default_line(plan, plan.by_default))
    if plan.both_rooms_win and plan.both_rooms is not None:
        lines += _both_rooms_lines(plan.both_rooms)
    if plan.binds == "host memory":
        where = plan.binds
    else:
        where = f"GPU memory in {phase_text(plan.binds)}"
    if any(row.seq_len for row in plan.longest):
        subject = "Longer sequences run"
    else:
        subject = "It runs"
    lines.append(f"{subject} out of {where} first")
    if plan.choice is not None:  # commands of `remedies` follow a plan that does not fit
        lines += [f"  {lever.change}: up to {lever.seq_len:,} tokens" for lever in plan.levers]
    return lines


def _default_line(plan: Plan, default: DefaultStep) -> str:
    """Return a line of the plan's text with the prediction `default` for `patch(model)` without
    settings: chunk size, saved tensors, peak and seconds."""
    how = f"chunks of {default.chunk_size:,}"
    if not plan.default_wins:
        how = f"{DEFAULT_PATCH_TEXT}: {how}"
    if not default.fits and default.peak <= plan.memory.usable:
        return (
            f"  {how}, {size_text(default.peak)}: does not fit beside the "
            f"{size_text(RESERVED_BYTES)} that the default leaves free"
        )
    if not default.fits:
        return f"  {how}, {default.peak / GIB:.1f} GiB: does not fit"
    if default.way == OUTCOME_UNPATCHED:
        how += ", runs unpatched"
    else:
        how += f", saves {_saved_text(default.saved)}"
    if default.leaving:
        how += f", moves {default.leaving / GIB:.1f} GiB to the host"
    on = f", on {device_text(plan.rates)}" if plan.default_wins else ""
    return f"  {how}; peak {size_text(default.peak)}, {duration(default.seconds)} a step{on}"


def _both_rooms_lines(both_rooms: AutoOffloadStep) -> list[str]:
    """Return lines of the plan's text with the prediction `both_rooms` for offload="auto", which
    saves tensors for backward both in host memory and on the device."""
    pinning = duration(both_rooms.leaving / GIB * PINNING_SECONDS_PER_GIB)
    names = _saved_text(both_rooms.saved)
    return [
        f'  Faster: StreamConfig(chunk_size={both_rooms.chunk_size}, offload="auto"): saves '
        f"{names}; peak {both_rooms.peak / GIB:.1f} GiB, {duration(both_rooms.seconds)} a step",
        f"    {both_rooms.leaving / GIB:.1f} GiB leave for the host, "
        f"{both_rooms.on_device / GIB:.1f} GiB stay; the first steps measure, and allocate "
        f"host memory in about {pinning}",
    ]


def _saved_text(all_saved: Sequence[SavedTensors]) -> str:
    """Return text about tensors that layers save for backward in addition to their inputs, such as
    "kv of 36 layers, 4 Linears of up to 20 layers", or "nothing". The example means that the
    outputs of 4 Linears are saved, each in at most 20 layers."""
    savings = []
    linears = []
    for saved in all_saved:
        if saved.name in NAMED_SAVES:
            savings.append(f"{saved.name} of {saved.layers} layers")
        else:
            linears.append(saved.layers)
    savings += [f"{len(linears)} Linears of up to {max(linears)} layers"] if linears else []
    return ", ".join(savings) or "nothing"


def default_table(predicted: DefaultStep, measured: DefaultStep | None) -> str:
    """Return a table that compares the predicted and the measured step of `streambp.patch(model)`
    without settings: chunk size, saved tensors, peak and seconds.

    Args:
        predicted: the prediction.
        measured: the measurement; None: the device ran out of memory.
    """
    steps = [predicted]
    if measured is not None:
        steps.append(measured)
    cells: list[tuple[str, ...]] = [
        ("", "predicted", "measured"),
        ("step", *(step.way for step in steps)),
    ]
    cells.append(("chunk_size", *(f"{step.chunk_size:,}" for step in steps)))
    for name in dict.fromkeys(saved.name for step in steps for saved in step.saved):
        row = [name]
        for step in steps:
            cell = "-"
            for saved in step.saved:
                if saved.name == name:
                    cell = f"{saved.layers} layers, {(saved.bytes or 0.0) / 2**20:.2f}"
                    break
            row.append(cell)
        cells.append(tuple(row))
    cells.append(("peak with weights", *(f"{step.peak / 2**20:.2f}" for step in steps)))
    cells.append(("seconds", *(f"{step.seconds:.3g}" for step in steps)))
    if measured is None:
        for index in range(1, len(cells)):
            cells[index] += ("out of memory",)
    return "\n".join([f"{DEFAULT_PATCH_TEXT}, MiB", "", *columns(cells)])


def remedies_table(plan: Plan, remedies: Sequence[Remedy], commands: Sequence[str]) -> list[str]:
    """Return lines of text about other options of `streambp plan`, with which a step fits into
    memory or is faster. Each has the change, the step's cost, and the command that prints the plan.

    Args:
        plan: the requested plan, which may fit or not.
        remedies: the plans with other options.
        commands: the command line of each remedy, which prints the remedy's plan.
    """
    own_seconds = seconds_of(plan)
    lines = []
    title = ""
    for remedy, command in zip(remedies, commands, strict=True):
        choice = remedy.plan.choice
        assert choice is not None
        spent = seconds_of(remedy.plan)
        if plan.choice is None:
            kind = "Commands that fit:"
        elif spent <= (1 - ALLOWED_SLOWDOWN) * own_seconds:
            kind = "Faster:"
        else:
            kind = "Beside it:"
        if kind != title:
            lines += ["", kind]
            title = kind
        size = choice.peak.total
        host = choice.peak.host
        if remedy.plan.default_wins and remedy.plan.by_default is not None:
            size = remedy.plan.by_default.peak
            host = remedy.plan.by_default.leaving
        lines += [
            f"  {remedy.change}: {choice.seq_len:,} tokens, {size / GIB:.1f} GiB of each GPU, "
            f"{host / GIB:.1f} GiB of host memory, {duration(spent)} a step",
            f"    {command}",
        ]
    if plan.choice is None and not remedies:
        lines += [
            "",
            "Nothing that was tried fits: LoRA on 4-bit weights, weights and optimizer state on "
            f"the host, {MAX_GPUS} GPUs. Take GPUs with more memory (--gpu-memory).",
        ]
    return lines


def _chosen_lines(plan: Plan, choice: Choice) -> list[str]:
    """Return lines of the plan's text about the chosen step: settings, bytes, seconds by kind of
    kernel, weights on the host, and similarly fast settings.

    Args:
        plan: the plan.
        choice: the plan's fastest step that fits (`plan.choice`).
    """
    peak = choice.peak
    spent = choice.seconds
    on_host = choice.on_host
    safest = plan.safest
    lines = [
        f"{tokens_text(choice.seq_len)}: {config_code(choice)}",
        f"  peak {size_text(peak.total)} in {phase_text(peak.phase)}, {size_text(peak.host)} of "
        f"host memory, {_flops_text(choice.flops)}",
    ]
    speed = throughput(spent, choice.seq_len, plan.profile.batch_size, plan.setting)
    parts = {
        "matrix products": spent.products,
        "attention": spent.attention,
        "other kernels": spent.elementwise,
    }
    for name, value in (("waiting", spent.waiting), ("exchanges", spent.exchange)):
        parts |= {name: value} if value >= 0.005 * spent.total else {}
    lines.append(
        f"  {duration(spent.total)} a step, {speed:,.0f} tokens/s, on {device_text(plan.rates)}: "
        + ", ".join(f"{name} {duration(value)}" for name, value in parts.items())
    )
    if plan.setting.gpus > 1:
        lines.append(
            "  seconds of several GPUs were not measured; parameters and gradients that the GPUs "
            "exchange are left out"
        )
    if on_host is not None:
        hidden = "their copies take longer than the layers at any length"
        if choice.hidden_from is not None:
            hidden = f"their copies hide behind the layers from {choice.hidden_from:,} tokens a row"
        gradients = (
            f"; gradients of {on_host.trained / GIB:.1f} GiB leave for the host, with their "
            "optimizer"
        )
        lines.append(
            f"  weights of the first {on_host.layers} of {on_host.of} layers on the host: "
            f"{on_host.bytes / GIB:.1f} GiB there, {WEIGHT_SLOTS * on_host.largest / GIB:.1f} GiB "
            "for "
            f"two layers on the GPU; {hidden}" + (gradients if on_host.trained else "")
        )
    if plan.setting.split:
        ranks = plan.setting.ranks
        lines.append(
            f"  each of the {ranks} ranks: {choice.seq_len // ranks:,} of the tokens in chunks of "
            f"chunk_size, the peak, and {choice.link / GIB:.1f} GiB to the others in a step; "
            f"{duration(spent.exchange)} of exchanges are not hidden (rates of links guessed)"
        )
    following = []
    for timed in plan.next_fastest:
        following.append(
            f"{timed.method} in {duration(timed.seconds)} ({timed.peak / GIB:.1f} GiB)"
        )
    lines += [f"  next in speed: {', '.join(following)}"] if following else []
    # less memory costs almost no time
    if safest is not None and safest.peak.total <= 0.95 * peak.total:
        seconds_text = duration(safest.seconds.total)
        lines.append(
            f"  safest, {safest.peak.total / GIB:.1f} GiB in {seconds_text}: {config_code(safest)}"
        )
    return lines


def device_text(rates: Rates) -> str:
    """Return the device's name. A remark follows if the device was assumed from the requested
    amount of GPU memory, or if some of its speeds (FLOP/s, bytes/s) come from the datasheet."""
    text = rates.name
    if rates.assumed:
        text += " (assumed from the memory; --device NAME for yours)"
    if rates.guess:
        text += ", its rates partly from the datasheet"
    return text


def duration(seconds: float) -> str:
    """Return a number of seconds as text with a unit, such as "12.3 s" or "4.56 ms". Less than a
    hundred seconds are rounded to about three digits."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if 0.0 < seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s"


def tokens_text(tokens: int) -> str:
    """Return a number of tokens as text: "65,536 tokens", or "1 token"."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def _flops_text(flops: float) -> str:
    """Return a number of FLOPs as text in PFLOP, or in smaller units if this would be rounded to
    0.0."""
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP")):
        if flops >= 0.05 * unit:
            return f"{flops / unit:.1f} {name}"
    return f"{flops / 1e9:.1f} GFLOP"


def phase_text(name: str) -> str:
    """Return the name of a part of a training step in words, such as "backward of layer 35" for the
    planner's name "backward 35"."""
    kind, _, layer = name.partition(" ")
    if layer.isdecimal():
        return f"{kind} of layer {layer}"
    return name


def fold_lines(lines: Sequence[str], width: int | None) -> list[str]:
    """Return lines of text wrapped to a width, with the parts after the first indented. Lines with
    a `StreamConfig(...)` stay unwrapped.

    Args:
        lines: the lines.
        width: columns of the terminal; None: no line is wrapped.
    """
    wrapped: list[str] = []
    for line in lines:
        if width is None or len(line) <= width or CONFIG_CODE_START in line:
            wrapped.append(line)
        else:
            under = " " * (len(line) - len(line.lstrip()) + 2)
            wrapped += textwrap.wrap(
                line, width, subsequent_indent=under, break_long_words=False, break_on_hyphens=False
            )
    return wrapped


def tree_lines(node: Node, depth: int = 0) -> list[str]:
    """Return one line of text for a module and each module inside: name, number of equal modules
    and class, parameters, and activation KiB for each token.

    Args:
        node: the module, with the modules inside as children.
        depth: level of the module in the tree, by which its line is indented; 0 for the model.
    """
    if node.count > 1:
        times = f"{node.count} x "
    else:
        times = ""
    name = f"({node.name}) " if node.name else ""
    label = f"{'  ' * depth}{name}{times}{node.kind}"
    if node.activation:
        activation = f"{node.activation / 1024:.1f} KiB"
    else:
        activation = "-"
    lines = [
        f"{label:<58} {_count(node.parameters) if node.parameters else '-':>9} {activation:>14}"
    ]
    for child in node.children:
        lines += tree_lines(child, depth + 1)
    return lines


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table as lines of text with aligned columns. The first column is flush left, and the
    others are flush right.

    Args:
        rows: the cells of each row; all rows have equally many cells.
    """
    widths = []
    for index in range(len(rows[0])):
        widths.append(max(len(row[index]) for row in rows))
    lines: list[str] = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("  ".join(cells))
    return lines


@contextlib.contextmanager
def progress(stream: TextIO, doing: str) -> Iterator[Callable[[str, float], None]]:
    """Context manager that yields a function to draw a progress bar, and clears the bar at the end.

    The function does nothing unless the stream is a terminal.

    Args:
        stream: the stream of the bar, such as stderr.
        doing: text beside the bar.
    """

    def draw_progress(text: str, fraction: float) -> None:
        """Draw the progress bar.

        Args:
            text: text behind `doing`: what is computed now, such as "checkpointing".
            fraction: finished fraction of the work.
        """
        if stream.isatty():
            full = round(BAR_COLUMNS * fraction)
            stream.write(
                f"\r\033[K{'█' * full}{'░' * (BAR_COLUMNS - full)} "
                f"{100 * fraction:3.0f} % {doing} {text}"
            )
            stream.flush()

    try:
        yield draw_progress
    finally:
        if stream.isatty():
            stream.write("\r\033[K")
            stream.flush()


def comparison_table(rows: Sequence[PhaseComparison], seq_len: int, chunk_size: int) -> str:
    """Return a table of the predicted and measured peak MiB of each phase of a step (the forward or
    backward of a layer, for example), with the difference in percent. The last row is the largest
    peak.

    Args:
        rows: predicted and measured bytes of each phase, in order.
        seq_len: tokens of a row, for the heading.
        chunk_size: tokens of a chunk, for the heading.
    """
    lines = [
        f"One step of {seq_len:,} tokens in chunks of {chunk_size:,}; MiB beyond what was there "
        "before it",
        "",
    ]
    predicted = max(row.predicted for row in rows)
    measured = max(row.measured for row in rows)
    cells = [("phase", "predicted", "measured", "difference")]
    for row in (*rows, PhaseComparison("peak", predicted, measured)):
        if row.measured:
            difference = f"{100 * (row.predicted / row.measured - 1):+.2f} %"
        else:
            difference = "-"
        cells.append(
            (row.phase, f"{row.predicted / 2**20:.2f}", f"{row.measured / 2**20:.2f}", difference)
        )
    return "\n".join([*lines, *columns(cells)])


def _count(number: int) -> str:
    """Return a number of parameters as text, for example "8.19B" (billions) or "1.50M"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)


def as_json(result: Any) -> str:
    """Return a dataclass, or nested dicts and lists, as JSON text.

    NaN and infinity become null, because JSON has neither.
    """

    def finite(value: Any) -> Any:
        """Return a value as JSON types, with null for numbers that are not finite."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return finite(dataclasses.asdict(value))
        if isinstance(value, dict):
            return {name: finite(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [finite(inner) for inner in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(finite(result), indent=2, allow_nan=False)
