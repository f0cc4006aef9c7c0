"""The command line: `streambp verify`, `streambp plan`, `streambp profile` and `streambp launch`."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from streambp.chunks import plan_chunks
from streambp.config import StreamConfig, parse_bytes
from streambp.device import is_accelerator, is_out_of_memory
from streambp.errors import ConfigError, StreamBPError
from streambp.fields import parse_length
from streambp.launch.command import add_launch, split
from streambp.planner.devices import DEFAULT, DEVICES, Rates, device_of, rates_of, write_rates
from streambp.planner.measure import compare_step
from streambp.planner.measure_device import measure_device
from streambp.planner.mixers import CHOICES
from streambp.planner.page import page
from streambp.planner.plan import Plan, plan
from streambp.planner.profile import Profile, Setting
from streambp.planner.remedies import Remedy, Training, remedies, with_options
from streambp.planner.report import Progress, as_json, comparison_table, plan_table, rates_table, remedies_table
from streambp.planner.rollouts import COMPLETIONS, Rollouts, Way, both_ways, rollouts_table
from streambp.reporting import reason
from streambp.verify.compare import verify

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
EXACT, NOT_EXACT, FAILED = 0, 1, 2
FITS, DOES_NOT_FIT = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success (exact, fits), 1 the opposite, 2 bad usage or a model that cannot be judged.

    `streambp launch` returns the exit code of its program.
    """
    ours, program = split(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(ours, argparse.Namespace(program=program, given=ours))
    try:
        code: int = arguments.run(arguments)
    except StreamBPError as error:
        return _failed(arguments, str(error))
    except Exception as error:  # an exit code of 1 would be a verdict
        if is_out_of_memory(error):
            advice = "Pass a smaller --seq-len, --dtype bfloat16, or --device cpu."
            return _failed(arguments, f"{str(error).splitlines()[0]} {advice}")
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        return _failed(arguments, f"{reason(error)} (in {where}). That is no verdict: check the arguments, or report it.")
    return code


def _failed(arguments: argparse.Namespace, text: str) -> int:
    print(" ".join(f"streambp: {arguments.model}: {text}".split()), file=sys.stderr)
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streambp", description="Exact training on long sequences.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_plan(commands)
    _add_profile(commands)
    add_launch(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser(
        "verify",
        help="is streaming exact on my model?",
        description="Compare streamed gradients with the unpatched model's, parameter by parameter, on random tokens. "
        "Exit code 0: exact; 1: not exact; 2: the model could not be judged.",
    )
    command.add_argument("model", metavar="PATH_OR_ID", help="a checkpoint's folder, or its id on the Hub")
    command.add_argument("--seq-len", type=int, default=512, help="tokens (default %(default)s)")
    command.add_argument("--chunk-size", type=int, help="default: at least four chunks, the last one shorter")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    _add_device(command)
    command.add_argument("--saves", default="", help="comma-separated, of attn_out and kv")
    command.add_argument("--seed", type=int, default=0, help="of the random tokens (default %(default)s)")
    command.add_argument("--left-padding", type=int, default=0, help="tokens of padding at the start (default %(default)s)")
    command.add_argument("--top", type=int, default=20, help="parameters to list, 0 for all (default %(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON, with every parameter, instead of a table")
    command.set_defaults(run=_run_verify)


def _add_device(command: Any) -> None:
    default, found = _accelerator() or "cpu", torch.accelerator.current_accelerator(check_available=True)
    choices = sorted({"cpu", "cuda", "cpu" if found is None else found.type})
    command.add_argument("--device", choices=choices, default=default, help="default here: %(default)s")


def _accelerator() -> str | None:
    """The type of this machine's GPUs, if torch finds some that can work beside the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or not is_accelerator(found) else found.type


def _check_device(device: str) -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (found is None or found.type != device):
        name = device.upper()
        raise StreamBPError(f"--device {device} was asked for, but torch finds no {name} device here. Pass --device cpu.")


def _run_verify(arguments: argparse.Namespace) -> int:
    _check_device(arguments.device)
    model = _load(arguments.model, arguments.dtype).to(arguments.device)
    saves = tuple(name for name in arguments.saves.split(",") if name)
    result = verify(
        model, arguments.seq_len, arguments.chunk_size, saves, arguments.seed, left_padding=arguments.left_padding
    )
    print(as_json(result) if arguments.json else result.table(max(arguments.top, 0)))
    return EXACT if result.exact else NOT_EXACT


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="what fits into my GPU?",
        description="Count a model's training steps without weights or GPU, and say how to train it on long sequences. "
        "Exit code 0: it fits; 1: it does not; 2: the model could not be counted.",
    )
    command.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="an id on the Hub, a checkpoint's folder, or a config.json"
    )
    command.add_argument(
        "--seq-len", default="max", help='positions per whole row, such as 64k or 1M; "max": the longest that fit'
    )
    command.add_argument("--gpu-memory", metavar="BYTES", help="of each GPU, such as 80GiB")
    command.add_argument(
        "--host-memory", metavar="BYTES", help="of the whole machine, for all its GPUs (default: no limit)"
    )
    command.add_argument("--reserve", type=float, default=0.05, help="part of the GPU left alone (default %(default)s)")
    _add_ranks(command)
    command.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage, 3 for FSDP2")
    command.add_argument("--batch-size", type=int, default=1, help="rows on each GPU (default %(default)s)")
    _add_training(command)
    command.add_argument(
        "--optimizer-bytes",
        type=float,
        default=12,
        help="a trained parameter: 12 is Adam with float32 weights, 16 with float32 gradients too, as DeepSpeed's "
        "ZeRO-Offload keeps them on the host, 4 Adam in bf16, 0 none (default %(default)s)",
    )
    command.add_argument("--optimizer-on-host", action="store_true", help="its state waits in host memory (ZeRO-Offload)")
    command.add_argument("--accumulate", action="store_true", help="steps add to gradients that exist")
    command.add_argument("--dtype", choices=DTYPES[1:], default="bfloat16", help="of the weights (default %(default)s)")
    command.add_argument("--kernels", choices=("cudnn", "flash"), default="cudnn", help="attention kernels on the GPU")
    command.add_argument(
        "--mixers",
        choices=CHOICES,
        default="kernels",
        help="what recurrent and convolutional layers run: the kernels of fla, mamba_ssm and causal_conv1d, transformers' "
        "plain torch instead, or the kernels that are installed here (default %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print JSON, with every line that peaks are computed from")
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page that plans anew for other lengths and memory; with --lora, for full training as well, with "
        "--fused-layers without them, with --ulysses or --context-parallel for any number of ranks",
    )
    command.add_argument("--group", type=int, metavar="ROWS", help="plan that many completions of one prompt instead")
    command.add_argument(
        "--prompt",
        metavar="TOKENS",
        help=f"of a group's rows, such as 32k; the rest of --seq-len is completion (default: {COMPLETIONS} tokens)",
    )
    _add_seconds(command)
    command.set_defaults(run=_run_plan)


def _add_training(command: argparse.ArgumentParser) -> None:
    """The parameters that are trained, and how many bits the others have."""
    trained = command.add_mutually_exclusive_group()
    trained.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank on every Linear of the layers"
    )
    trained.add_argument(
        "--full", action="store_true", help="train every parameter (default: plan that, and LoRA beside it)"
    )
    command.add_argument("--bits", type=int, choices=(4, 8, 16), default=16, help="of a frozen base (default %(default)s)")


def _add_ranks(command: argparse.ArgumentParser) -> None:
    """How many there are, and how many share a sequence."""
    command.add_argument("--gpus", type=int, help="all ranks (default: 1, or those that share a sequence)")
    command.add_argument(
        "--ulysses", type=int, default=1, metavar="N", help="ranks that share each sequence by DeepSpeed Ulysses"
    )
    command.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="ranks that share each sequence by context parallelism"
    )


def _add_seconds(command: argparse.ArgumentParser) -> None:
    """What a plan's seconds are computed from, and its cache."""
    command.add_argument(
        "--device",
        metavar="NAME",
        help=f"whose rates seconds are computed from: {', '.join(DEVICES)}, or a file of --measure-device (default: "
        f"a usual one with so much memory, else {DEFAULT})",
    )
    command.add_argument(
        "--measure-device",
        type=Path,
        metavar="FILE",
        help="measure this machine's rates, write them to a file, and use them; without MODEL nothing is planned",
    )
    command.add_argument(
        "--fused-layers",
        action="store_true",
        help="norms, gated activations and rotary embeddings run fused kernels (Liger)",
    )
    command.add_argument("--no-cache", action="store_true", help="count anew, and leave nothing for the next plan")


def _run_plan(arguments: argparse.Namespace) -> int:
    for option, file in (("--html", arguments.html), ("--measure-device", arguments.measure_device)):
        if file is not None:
            _check_writable(option, file)
    rates = _rates(arguments)
    if not arguments.model and arguments.measure_device is not None:
        return FITS
    if not arguments.model or arguments.gpu_memory is None:
        raise ConfigError(
            "A plan needs MODEL and --gpu-memory, such as `streambp plan Qwen/Qwen3-8B --gpu-memory 80GiB --lora 16`."
        )
    setting = Setting(
        gpus=max(arguments.ulysses, arguments.context_parallel) if arguments.gpus is None else arguments.gpus,
        ulysses=arguments.ulysses,
        context_parallel=arguments.context_parallel,
        zero=arguments.zero,
        optimizer=arguments.optimizer_bytes,
        optimizer_on_host=arguments.optimizer_on_host,
        accumulate=arguments.accumulate,
    )
    said = Progress(sys.stderr)
    counted = functools.partial(
        plan,
        arguments.model,
        parse_length(arguments.seq_len),
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        setting=setting,
        reserve=arguments.reserve,
        batch_size=arguments.batch_size,
        dtype=getattr(torch, arguments.dtype),
        kernels=arguments.kernels,
        mixers=arguments.mixers,
        rates=rates,
        cache=not arguments.no_cache,
        said=said,
        every_split=arguments.html is not None and setting.ranks > 1,
    )
    trainings: list[dict[str, Any]] = [{"lora": arguments.lora, "bits": arguments.bits}]
    trainings += [{}] if arguments.lora is not None and arguments.html is not None else []
    with said:
        found, *others = (counted(**way, fused_layers=arguments.fused_layers) for way in trainings)
        switched = [counted(**way) for way in trainings] if arguments.html is not None and arguments.fused_layers else []
    if arguments.html is not None:
        _write_page(arguments, found, *([one.profile for one in some] for some in (others, switched)))
    if arguments.group is not None:
        ways = list(_rollouts(arguments, found))
        print(as_json({"group": ways}) if arguments.json else rollouts_table(found, ways))
        return FITS if all(shared.fits for _, shared in ways) else DOES_NOT_FIT
    print(as_json(found) if arguments.json else plan_table(found))
    if not arguments.json:
        _print_what_fits(arguments, found, counted)
    return FITS if found.choice is not None else DOES_NOT_FIT


def _print_what_fits(arguments: argparse.Namespace, found: Plan, counted: Callable[..., Plan]) -> None:
    """Commands with which a plan fits that does not; beside one that does, LoRA where no training was named."""
    training = Training(arguments.lora, arguments.bits)

    def count(how: Training) -> Profile:
        return counted(lora=how.lora, bits=how.bits, fused_layers=arguments.fused_layers).profile

    if found.choice is None:
        others = list(remedies(found, parse_length(arguments.seq_len), training, count))
    elif training == Training() and not arguments.full:
        how = next(training.smaller())
        adapters = counted(lora=how.lora, bits=how.bits, fused_layers=arguments.fused_layers)
        others = [Remedy(str(how), how.options, adapters)] if adapters.choice is not None else []
    else:
        return
    commands = [shlex.join(["streambp", *with_options(arguments.given, other.options)]) for other in others]
    print("\n".join(remedies_table(found, others, commands)))


def _rollouts(arguments: argparse.Namespace, found: Plan) -> Iterator[tuple[Way, Way]]:
    """A group as rows and with its prompt shared; with the usual completions, or those that --seq-len leaves."""
    prompt, row = (parse_length(text) for text in (arguments.prompt or "max", arguments.seq_len))
    if prompt == "max" or (row != "max" and row <= prompt):
        raise ConfigError("A group needs --prompt, tokens of each row, such as 32k; --seq-len has them and a completion.")
    for completion in COMPLETIONS if row == "max" else (row - prompt,):
        rollouts = Rollouts(prompt, completion, arguments.group)
        yield both_ways(found.profile, rollouts, found.memory, found.setting, found.rates)


def _rates(arguments: argparse.Namespace) -> Rates:
    """Of the device that was named or measured."""
    if arguments.measure_device is None:
        memory = None if arguments.gpu_memory is None else device_of(parse_bytes("gpu_memory", arguments.gpu_memory))
        return rates_of(memory or DEFAULT if arguments.device is None else arguments.device)
    if arguments.device is not None:
        raise ConfigError("--device names rates and --measure-device measures them: pass one of the two.")
    rates = measure_device(_accelerator() or "cpu")
    write_rates(rates, arguments.measure_device)
    print(rates_table(rates, arguments.measure_device), file=sys.stderr)
    return rates


def _write_page(arguments: argparse.Namespace, found: Plan, others: list[Profile], switched: list[Profile]) -> None:
    base = f", {arguments.bits}-bit base" if arguments.bits < 16 else ""
    training = "every parameter" if arguments.lora is None else f"LoRA, rank {arguments.lora}{base}"
    path = Path(arguments.model).resolve()
    name = path.parent.name if path.is_file() else path.name if path.is_dir() else arguments.model
    labels = [training, "every parameter"]
    unfused = dict(zip(labels, switched, strict=False))
    arguments.html.write_text(page(found, name, dict(zip(labels[1:], others, strict=False)), training, unfused), "utf-8")


def _check_writable(option: str, file: Path) -> None:
    """Raise before minutes of counting rather than after; the file is as it was."""
    new = not file.exists()
    try:
        with file.open("a"):
            pass
        if new:
            file.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        why = getattr(error, "strerror", None) or error
        raise StreamBPError(f"{option} {file} cannot be written ({why}). Pass another file.") from error


def _add_profile(commands: Any) -> None:
    command = commands.add_parser(
        "profile",
        help="a real step beside its prediction",
        description="Run one streamed training step and compare the memory of its phases with what the planner predicts.",
    )
    command.add_argument("model", metavar="PATH_OR_ID", help="a checkpoint's folder, or its id on the Hub")
    command.add_argument("--seq-len", default="8k", help="tokens (default %(default)s)")
    command.add_argument("--chunk-size", type=int, help="default: streambp's own choice")
    command.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as stored)")
    _add_device(command)
    command.add_argument("--saves", default="", help="comma-separated, of attn_out, kv and globs of Linears")
    command.add_argument("--offload", choices=("none", "cpu"), default="none", help="default %(default)s")
    command.add_argument("--snapshot", type=Path, metavar="FILE", help="write torch's memory snapshot of the step (CUDA)")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_run_profile)


def _run_profile(arguments: argparse.Namespace) -> int:
    length = parse_length(arguments.seq_len)
    if length == "max":
        raise ConfigError("--seq-len of a profile must be a number of tokens: the step is run.")
    _check_device(arguments.device)
    saves = tuple(name for name in arguments.saves.split(",") if name)
    chunk_size: Any = "auto" if arguments.chunk_size is None else arguments.chunk_size
    config = StreamConfig(chunk_size=chunk_size, saves=saves, offload=arguments.offload)
    chunk = plan_chunks(length, 1, config.chunk_size).size
    model = _load(arguments.model, arguments.dtype).to(arguments.device).train()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, length), device=arguments.device)  # [B, T]
    rows = compare_step(model, ids, config, chunk, arguments.snapshot)
    print(as_json({"phases": rows}) if arguments.json else comparison_table(rows, length, chunk))
    return FITS


def _load(path_or_id: str, dtype: str) -> PreTrainedModel:
    """The checkpoint with transformers' default attention: sdpa wherever the model has it."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers' code, with files from anywhere
        raise StreamBPError(
            f"It could not be loaded as a causal language model ({reason(error)}). Pass the folder that save_pretrained "
            "wrote, or an id on the Hub that this machine can reach."
        ) from error
    return model
