"""Execute the commands that read or run a model: `env`, `verify`, `plan` and `profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from streambp.chunks import plan_chunks
from streambp.cli.environment import environment, format_facts
from streambp.cli.profile_page import profile_page
from streambp.device import is_accelerator
from streambp.errors import StreamBPError
from streambp.fields import short_repr
from streambp.model.positions import positions_warning
from streambp.planner.batches import (
    COMPLETION_TOKENS,
    Batch,
    batches_table,
    predict_padded_and_packed,
)
from streambp.planner.configuration import TRUST_REMOTE_CODE_HINT, needs_trust, read_config
from streambp.planner.fused_layers import fusion
from streambp.planner.measure import compare_default, compare_step
from streambp.planner.measure_device import measure_device
from streambp.planner.page import page
from streambp.planner.plan import ALLOWED_SLOWDOWN, Plan, plan, plan_step
from streambp.planner.profile import Profile, Setting
from streambp.planner.report import (
    as_json,
    comparison_table,
    default_table,
    duration,
    plan_table,
    progress,
    remedies_table,
)
from streambp.planner.suggestions import (
    Training,
    best_change,
    faster_changes,
    profile_of,
    remedies,
    replace_options,
    seconds_of,
)
from streambp.planner.survey import STREAMED_RECIPES
from streambp.planner.whole_run import whole_run, whole_run_text
from streambp.rates import DEFAULT_DEVICE, Rates, assumed_rates, rates_of, write_rates
from streambp.reporting import reason
from streambp.verify.compare import compare_methods
from streambp.verify.methods import check_methods
from streambp.verify.random_model import CutModel, random_model

EXIT_EXACT, EXIT_NOT_EXACT = 0, 1
EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1


def run_env(arguments: Any) -> int:
    """Print versions, devices and kernels for a bug report, and return the exit code 0.

    Args:
        arguments: the parsed options of `streambp env`.
    """
    facts = environment()
    print(as_json(facts) if arguments.json else format_facts(facts), file=arguments.out)
    return 0


def _accelerator() -> str | None:
    """Return the device type of this machine's accelerators, such as "cuda"; None if torch finds
    none that streambp supports."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not is_accelerator(accelerator):
        return None
    return accelerator.type


def _device(device_name: str) -> str:
    """Return the device to run on, such as "cuda:1". The default is this machine's GPU, and "cpu"
    without a GPU.

    Args:
        device_name: the value of --device; "": not given.

    Raises:
        StreamBPError: torch finds no device of this name. The message lists the devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not device_name:
        return _accelerator() or "cpu"
    device_names = ["cpu"]
    if accelerator is not None:
        device_names.append(accelerator.type)
        for number in range(torch.accelerator.device_count()):
            device_names.append(f"{accelerator.type}:{number}")
    if device_name not in device_names:
        raise StreamBPError(
            f"--device {short_repr(device_name)} was asked for, but torch finds no such device "
            f"here. Pass --device {' or '.join(device_names)}."
        )
    return device_name


def run_verify(arguments: Any) -> int:
    """Print how far a model's gradients, with and without streambp, are from those of a reference,
    the unpatched model in a wider dtype. Return the exit code: 0 if streambp's are exact, otherwise
    1.

    Args:
        arguments: the parsed options of `streambp verify`.
    """
    device = _device(arguments.device)
    check_methods(arguments.against)
    notes = []
    with progress(sys.stderr, "running") as on_progress:
        if arguments.random:
            on_progress("nothing yet: random weights are made", 0.0)
            small_model = _random_model(arguments)
            model = small_model.model
            notes.append(small_model.note())
        else:
            on_progress("nothing yet: weights are loaded", 0.0)
            model = _load(arguments)
        result = compare_methods(
            model.to(device), arguments.against, arguments.seq_len,
            int(arguments.config.chunk_size), arguments.config.saves, arguments.seed,
            arguments.left_padding, on_progress,
        )  # fmt: skip
    verification = result.verification
    verification = dataclasses.replace(verification, notes=(*notes, *verification.notes))
    result = dataclasses.replace(result, verification=verification)
    if arguments.json:
        fields = dataclasses.asdict(verification)
        if arguments.against:
            fields["methods"] = result.methods
        print(as_json(fields), file=arguments.out)
    else:
        print(result.table(arguments.top), file=arguments.out)
    return EXIT_EXACT if verification.exact else EXIT_NOT_EXACT


def _random_model(arguments: Any) -> CutModel:
    """Return the model of `streambp verify --random`: random weights, and only the first layers of
    the model that a configuration describes.

    Args:
        arguments: the parsed options of `streambp verify`.
    """
    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    config = read_config(arguments.model, arguments.trust_remote_code)
    return random_model(config, arguments.layers, dtype, arguments.seed)


def run_plan(arguments: Any) -> int:
    """Print the fastest settings with which a training step fits into memory, and code to use them,
    for the parsed options of `streambp plan`. Return the exit code: 0 if a step fits, otherwise 1.
    """
    rates = _rates(arguments)
    if not arguments.model:
        return EXIT_FITS
    setting = Setting(
        gpus=max(arguments.ulysses, arguments.context_parallel)
        if arguments.gpus is None
        else arguments.gpus,
        ulysses=arguments.ulysses,
        context_parallel=arguments.context_parallel,
        zero=arguments.zero,
        optimizer=arguments.optimizer_bytes,
        optimizer_on_host=arguments.optimizer_on_host,
        accumulate=arguments.accumulate,
        weights=arguments.weights,
    )
    batches = _batches(arguments)
    training = Training(arguments.lora, arguments.bits)
    with progress(sys.stderr, "counting") as on_progress:
        on_progress("nothing yet: the configuration is read", 0.0)
        counted = functools.partial(
            plan,
            read_config(arguments.model, arguments.trust_remote_code),
            arguments.seq_len,
            gpu_memory=arguments.gpu_memory,
            host_memory=arguments.host_memory,
            setting=setting,
            reserve=arguments.reserve,
            batch_size=arguments.batch_size
            if arguments.lengths is None and arguments.mean_length is None
            else 1,
            dtype=getattr(torch, arguments.dtype),
            attention=arguments.attention,
            kernels=arguments.kernels,
            mixers=arguments.mixers,
            rates=rates,
            cache=not arguments.no_cache,
            said=on_progress,
            lora_targets=tuple(filter(None, arguments.lora_targets.split(","))),
            encoder_len=arguments.encoder_len,
            every_split=arguments.html is not None and setting.ranks > 1,
        )
        base_plan = counted(lora=training.lora, bits=training.bits)
        notes = _notes(arguments, base_plan, training, counted)
        if arguments.html is not None:
            _write_page(arguments, base_plan, training, counted)
    if batches:
        ways = []
        for batch in batches:
            ways.append(
                predict_padded_and_packed(
                    base_plan.profile, batch, base_plan.memory, base_plan.setting, base_plan.rates
                )
            )
        print(
            as_json({"batches": ways}) if arguments.json else batches_table(base_plan, ways),
            file=arguments.out,
        )
        if all(packed.fits for _, packed in ways):
            return EXIT_FITS
        return EXIT_DOES_NOT_FIT
    cost = None
    if arguments.dataset is not None:
        cost = whole_run(base_plan, arguments.dataset, arguments.epochs or 1.0, arguments.price)
    if arguments.json:
        fields = {**vars(base_plan), "default_wins": base_plan.default_wins, "whole_run": cost}
        print(as_json(fields), file=arguments.out)
    else:
        if arguments.out.isatty():
            width = shutil.get_terminal_size().columns
        else:
            width = None
        print(plan_table(base_plan, arguments.modules, width, notes), file=arguments.out)
        if cost is not None:
            print(f"\n{whole_run_text(cost, base_plan.seq_len)}", file=arguments.out)
        _print_alternatives(arguments, base_plan, training, counted)
    return EXIT_FITS if base_plan.choice is not None else EXIT_DOES_NOT_FIT


def _notes(
    arguments: Any, base_plan: Plan, training: Training, counted: Callable[..., Plan]
) -> list[str]:
    """Return the lines to print with a plan that apply to this plan. The lines have the options
    from training files (`--from`), a warning of sequences longer than the model's positions, and an
    explanation of GB and GiB. If Liger is not installed and would make the step faster, a line has
    the seconds with Liger's kernels.

    Args:
        arguments: the parsed options of `streambp plan`.
        base_plan: the plan that is printed.
        training: the kind of training (LoRA, bits) of the plan.
        counted: `streambp.planner.plan` with the arguments of this command line bound. A call with
            `lora`, `bits` and so on returns the plan for another kind of training.
    """
    lines = [arguments.from_text] if arguments.from_text else []
    config = read_config(arguments.model, arguments.trust_remote_code)
    warning = positions_warning(config, base_plan.seq_len)
    if warning is not None:
        lines.append(f"Warning: {warning}")
    lines += _decimal_units_note(arguments.gpu_memory)
    liger_missing = arguments.kernels == "auto" and fusion("auto", "cuda") is None
    if base_plan.choice is None or arguments.json or not liger_missing:
        return lines
    names = (STREAMED_RECIPES[0].name, base_plan.choice.method)
    with contextlib.suppress(StreamBPError):  # a note must not end the plan
        profile = counted(
            lora=training.lora, bits=training.bits, with_liger=True, methods=names,
            every_split=False,
        ).profile  # fmt: skip
        liger = plan_step(
            profile, base_plan.seq_len, base_plan.memory, base_plan.setting, base_plan.rates
        )
        if seconds_of(liger) <= (1 - ALLOWED_SLOWDOWN) * seconds_of(base_plan):
            lines.append(
                f"With liger-kernel, which is not installed here: {duration(seconds_of(liger))} a "
                "step, if Liger supports the model (pip install liger-kernel)"
            )
    return lines


def _decimal_units_note(gpu_memory: int) -> list[str]:
    """Return a list with a note if `gpu_memory`, in bytes, is a whole number of GB (10^9 bytes);
    otherwise []. The user may have meant GiB (2^30 bytes): a GPU that is sold with 80 GB has about
    80 GiB, which is more."""
    number, remainder = divmod(gpu_memory, 10**9)
    if remainder or not number:
        return []
    return [
        f"Note: {number}GB are {gpu_memory / 2**30:.1f} GiB. A GPU that is sold with {number} GB "
        f"has about {number}GiB: --gpu-memory {number}GiB"
    ]


def _print_alternatives(
    arguments: Any, base_plan: Plan, training: Training, counted: Callable[..., Plan]
) -> None:
    """Print plans with other options, each with the command line that requests it. If no step of
    `base_plan` fits into memory, these are plans that fit; otherwise they are faster plans.

    A plan with LoRA is printed as well if `base_plan` fits and the user chose neither LoRA nor full
    training.

    Args:
        arguments: the parsed options of `streambp plan`.
        base_plan: the plan for these options.
        training: the kind of training (LoRA, bits) of this plan.
        counted: `streambp.planner.plan` with the arguments of this command line bound. A call with
            `lora` and `bits` returns the plan for another kind of training.
    """

    def count(how: Training) -> Profile:
        """Return the memory and FLOPs of the model's training steps (`Profile`) under another kind
        of training, `how`: LoRA, for example. The steps are counted on tensors without data."""
        profile: Profile = counted(lora=how.lora, bits=how.bits).profile
        return profile

    if base_plan.choice is None:
        other_plans = list(remedies(base_plan, arguments.seq_len, training, count))
    else:
        other_plans = list(faster_changes(base_plan, training, count))
        if training == Training() and not arguments.full:
            how = next(training.smaller())
            profile = profile_of(how, count)
            adapters = None
            if profile is not None:
                adapters = best_change(base_plan, base_plan.seq_len, profile, how)
            if adapters is not None:
                other_plans.append(adapters)
    if base_plan.choice is not None and not other_plans:
        return
    commands = []
    for remedy in other_plans:
        commands.append(shlex.join(["streambp", *replace_options(arguments.words, remedy.options)]))
    print("\n".join(remedies_table(base_plan, other_plans, commands)), file=arguments.out)


def _batches(arguments: Any) -> list[Batch]:
    """Return the micro-batches of several rows that the options of `streambp plan` describe; [] if
    they describe none. The command plans each micro-batch twice: with padded rows, and packed into
    one row.

    Options that describe rows:

        --group        completions of one prompt, of default lengths if --seq-len is "max";
                       otherwise each completion has --seq-len minus --prompt tokens
        --mean-length  rows of this mean length
        --lengths      rows drawn from a data set's lengths, cut at --seq-len

    Args:
        arguments: the parsed options of `streambp plan`.
    """
    row = arguments.seq_len
    rows = arguments.batch_size
    if arguments.group is not None:
        prompt = arguments.prompt
        completions = COMPLETION_TOKENS if row == "max" else (row - prompt,)
        return [
            Batch((prompt + completion,) * arguments.group, prompt) for completion in completions
        ]
    if arguments.mean_length is not None:
        return [Batch.of_mean(row, arguments.mean_length, rows)]
    if arguments.lengths is not None:
        if row == "max":
            row_lengths = arguments.lengths
        else:
            row_lengths = [min(length, row) for length in arguments.lengths]
        return [Batch.of_data(row_lengths, rows)]
    return []


def _rates(arguments: Any) -> Rates:
    """Return the device's speeds (FLOP/s, bytes/s): measured on this machine and written to a file
    (--measure-device), looked up by name (--device), or assumed from --gpu-memory.

    Args:
        arguments: the parsed options of `streambp plan`.
    """
    if arguments.measure_device is None:
        if arguments.device is None and arguments.gpu_memory is not None:
            return assumed_rates(arguments.gpu_memory)
        return rates_of(arguments.device or DEFAULT_DEVICE)
    rates = measure_device(_accelerator() or "cpu")
    write_rates(rates, arguments.measure_device)
    print(
        f"{rates.name}: {rates.products / 1e12:.3g} TFLOP/s in matrix products, "
        f"{rates.forward / 1e12:.3g} and {rates.backward / 1e12:.3g} in attention forward and "
        f"backward, {rates.bandwidth / 1e12:.3g} TB/s in other kernels, {rates.link / 1e9:.3g} "
        f"GB/s to and from the host; written to {arguments.measure_device}",
        file=sys.stderr,
    )
    return rates


def _write_page(
    arguments: Any, base_plan: Plan, training: Training, counted: Callable[..., Plan]
) -> None:
    """Write the planner's HTML page to the file of --html. The page includes the counted memory and
    costs of steps for several kinds of training (LoRA, 4 bits). The page's controls switch between
    the kinds.

    Args:
        arguments: the parsed options of `streambp plan`.
        base_plan: the plan that the page shows at first.
        training: the kind of training (LoRA, bits) of this plan.
        counted: `streambp.planner.plan` with the arguments of this command line bound. A call with
            `lora`, `bits` and so on returns the plan for another kind of training.
    """
    name = _shown_name(arguments.model)
    profiles = {training: base_plan.profile}
    for how in (Training(), *training.smaller()):
        if how not in profiles:
            with contextlib.suppress(StreamBPError):  # not every model can have adapters
                profiles[how] = counted(lora=how.lora, bits=how.bits).profile
    fused = fusion(arguments.kernels, "cuda") is not None
    unfused = {}
    if fused:
        for how in profiles:
            unfused[str(how)] = counted(lora=how.lora, bits=how.bits, kernels="own").profile
    other_profiles = {str(how): profile for how, profile in profiles.items() if how != training}
    arguments.html.write_text(
        page(base_plan, name, other_profiles, str(training), unfused), "utf-8"
    )


def _shown_name(model: str) -> str:
    """Return a model's name for a heading: the name of its folder or of its config.json's folder,
    or its id on the Hub.

    Args:
        model: the model, as written on the command line: a path or an id.
    """
    path = Path(model).resolve()
    if path.is_file():
        return path.parent.name
    if path.is_dir():
        return path.name
    return model


def run_profile(arguments: Any) -> int:
    """Run one training step, print its measured memory beside the predicted memory, and return the
    exit code 0.

    Args:
        arguments: the parsed options of `streambp profile`.
    """
    length = arguments.seq_len
    config = arguments.config
    chunk = plan_chunks(length, 1, config.chunk_size).size
    device = _device(arguments.device)
    with progress(sys.stderr, "running") as on_progress:
        on_progress("nothing yet: weights are loaded", 0.0)
        model = _load(arguments).to(device).train()
        on_progress("a step", 0.5)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(0, vocabulary, (1, length), device=device)  # [B, T]
        rows = compare_step(model, ids, config, chunk, arguments.snapshot)
        on_progress("a step by default", 0.75)
        default = compare_default(model, ids)
    if arguments.html is not None:
        text = profile_page(rows, _shown_name(arguments.model), length, chunk)
        arguments.html.write_text(text, "utf-8")
    if arguments.json:
        if default is None:
            step_by_default = None
        else:
            step_by_default = dict(zip(("predicted", "measured"), default, strict=True))
        print(as_json({"phases": rows, "default": step_by_default}), file=arguments.out)
    else:
        tables = [
            comparison_table(rows, length, chunk),
            *([] if default is None else [default_table(*default)]),
        ]
        print("\n\n".join(tables), file=arguments.out)
    return EXIT_FITS


def _load(arguments: Any) -> PreTrainedModel:
    """Return the checkpoint as a causal language model, with transformers' default attention (sdpa
    wherever the model supports it).

    Args:
        arguments: the parsed options of a command, with the attributes `model`, `dtype` and
            `trust_remote_code`.

    Raises:
        StreamBPError: the checkpoint cannot be loaded.
    """
    name = arguments.model
    trusted = arguments.trust_remote_code
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype=arguments.dtype, trust_remote_code=trusted
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers' code may raise anything for such files
        advice = f"{TRUST_REMOTE_CODE_HINT} " if needs_trust(error) else ""
        raise StreamBPError(
            f"{short_repr(name)} could not be loaded as a causal language model ({reason(error)}). "
            f"{advice}Pass the folder that a model's save_pretrained wrote, or an id on the Hub that "
            f"this machine can reach.{_random_hint(arguments)}"
        ) from error
    return model


def _random_hint(arguments: Any) -> str:
    """Return a sentence for the error message about a checkpoint that could not be loaded: the
    option `--random`, if the folder has a configuration and no weights. "" for other folders, and
    for commands without this option."""
    folder = Path(arguments.model)
    if not hasattr(arguments, "random") or not (folder / "config.json").is_file():
        return ""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return ""
    return " Or add --random: this folder has a configuration and no weights."
