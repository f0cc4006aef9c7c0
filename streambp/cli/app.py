"""Define the command line of `streambp` for typer.

The function of each command only returns its arguments; `runs` executes the command. This module
imports neither torch nor transformers, so help and argument errors take no seconds.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

import streambp
from streambp.arguments import choice_option, number_parser, size, tokens
from streambp.fields import DTYPE_ALIASES
from streambp.launch.command import EXIT_UNPATCHED
from streambp.launch.hook import SETTINGS_VARIABLE
from streambp.launch.settings import AllowUnpatched, add_flags
from streambp.rates import DEVICES

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
MODEL, LENGTH, MEMORY, GPUS, TRAINING, TIME, OUTPUT = (
    "Model", "Sequence", "Memory", "GPUs", "Training", "Kernels and rates", "Output",
)  # fmt: skip


def _option(panel: str, help_text: str, *names: str, **options: Any) -> Any:
    """Return a typer option for a parameter of a command.

    Args:
        panel: heading of the help page under which the option is listed.
        help_text: help text of the option.
        names: names of the option, such as "--json". If empty, typer names the option after the
            command's parameter.
        options: other arguments of `typer.Option`.
    """
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **options)


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH_OR_ID", help="a checkpoint's folder, or its id or page on the Hub"
    ),
]
VerifiedModel = Annotated[
    str,
    typer.Argument(
        metavar="PATH_OR_ID",
        help="a checkpoint's folder, or its id or page on the Hub; with --random a config.json too",
    ),
]
PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="an id or a model's page on the Hub, a checkpoint's folder, or a config.json",
        show_default=False,
    ),
]
Trust = Annotated[
    bool, _option(MODEL, "run the Python code that comes with the model", "--trust-remote-code")
]
LoadedModel = Annotated[
    Any,
    _option(
        MODEL,
        f"dtype of the weights, or {', '.join(DTYPE_ALIASES)} (auto: as stored)",
        **choice_option(*DTYPES, aliases=DTYPE_ALIASES),
    ),
]
PlanDtype = Annotated[
    Any,
    _option(
        MODEL,
        f"dtype of the weights, or {', '.join(DTYPE_ALIASES)}",
        **choice_option(*DTYPES[1:], aliases=DTYPE_ALIASES),
    ),
]
Device = Annotated[
    str,
    _option(MODEL, "torch's device, such as cpu or cuda (default: this machine's GPU, else cpu)"),
]
Json = Annotated[bool, _option(OUTPUT, "print JSON instead of tables", "--json")]
Length = Annotated[
    Any, _option(LENGTH, "tokens, such as 512 or 8k", parser=tokens(), metavar="TOKENS")
]
Longest = Annotated[
    Any,
    _option(
        LENGTH,
        'tokens of a row, such as 64k; "max": the longest that fit',
        parser=tokens(True),
        metavar="TOKENS",
    ),
]
ChunkSize = Annotated[
    Any,
    _option(
        LENGTH, "tokens of a chunk (default: streambp's choice)", parser=tokens(), metavar="TOKENS"
    ),
]
Saves = Annotated[
    str,
    _option(
        TRAINING,
        "tensors that backward need not recompute: attn_out, kv, globs of Linears; separated by "
        "commas",
    ),
]
Seed = Annotated[
    Any, _option(LENGTH, "seed of the random tokens", parser=number_parser(0), metavar="N")
]
Padding = Annotated[
    Any, _option(LENGTH, "tokens of padding at the start", parser=number_parser(0), metavar="N")
]
RandomWeights = Annotated[
    bool,
    _option(
        MODEL,
        "random weights, made from the model's configuration: no weights are downloaded",
        "--random",
    ),
]
Layers = Annotated[
    Any,
    _option(
        MODEL,
        "with --random, keep so many first layers (default: as many as have every kind of layer)",
        parser=number_parser(1),
        metavar="N",
    ),
]
ComparedMethods = Annotated[
    str,
    _option(
        OUTPUT,
        "other methods to judge, on the same model, with their peak memory and seconds: unpatched, "
        "checkpointing, trl, liger; separated by commas",
        metavar="METHODS",
    ),
]
TopParameters = Annotated[
    Any, _option(OUTPUT, "parameters to list, 0 for all", parser=number_parser(0), metavar="N")
]
GpuMemory = Annotated[
    Any,
    _option(
        MEMORY,
        "memory of each GPU, such as 24GiB",
        parser=size,
        metavar="BYTES",
        show_default=False,
    ),
]
HostMemory = Annotated[
    Any,
    _option(
        MEMORY,
        "memory of the machine, for all its GPUs (default: no limit)",
        parser=size,
        metavar="BYTES",
    ),
]
Reserve = Annotated[
    Any,
    _option(
        MEMORY,
        "part of each GPU's memory that is kept free",
        parser=number_parser(0, 0.99, integers_only=False),
        metavar="PART",
    ),
]
Gpus = Annotated[
    Any,
    _option(
        GPUS,
        "number of GPUs (default: 1, or those that share a sequence)",
        parser=number_parser(1),
        metavar="N",
    ),
]
Ulysses = Annotated[
    Any,
    _option(
        GPUS,
        "ranks that share each sequence by DeepSpeed Ulysses",
        parser=number_parser(1),
        metavar="N",
    ),
]
ContextParallel = Annotated[
    Any,
    _option(
        GPUS,
        "ranks that share each sequence by context parallelism",
        parser=number_parser(1),
        metavar="N",
    ),
]
Zero = Annotated[Any, _option(GPUS, "ZeRO stage; 3 for FSDP2 too", **choice_option(0, 1, 2, 3))]
Rows = Annotated[Any, _option(LENGTH, "rows on each GPU", parser=number_parser(1), metavar="N")]
EncoderLen = Annotated[
    Any,
    _option(
        LENGTH,
        "tokens of a row of an encoder-decoder's encoder (default: as many as the decoder's)",
        parser=tokens(),
        metavar="TOKENS",
    ),
]
Lora = Annotated[
    Any,
    _option(
        TRAINING,
        "train adapters of this rank on every Linear of the layers",
        parser=number_parser(1),
        metavar="RANK",
    ),
]
LoraTargets = Annotated[
    str,
    _option(
        TRAINING,
        "names of the Linears that get adapters, separated by commas (default: all that peft "
        "accepts)",
        metavar="NAMES",
    ),
]
FullTraining = Annotated[
    bool,
    _option(TRAINING, "train every parameter (default: plan full training and LoRA)", "--full"),
]
Bits = Annotated[
    Any, _option(TRAINING, "bits of the frozen base weights (4 = QLoRA)", **choice_option(4, 8, 16))
]
OptimizerBytes = Annotated[
    Any,
    _option(
        TRAINING,
        "optimizer state of each trained parameter: 12 is Adam with float32 weights, 16 with "
        "float32 gradients too (ZeRO-Offload), 4 Adam in bf16, 0 none",
        parser=number_parser(0, 1024, integers_only=False),
        metavar="BYTES",
    ),
]
OptimizerOnHost = Annotated[
    bool,
    _option(
        TRAINING, "keep the optimizer's state in host memory (ZeRO-Offload)", "--optimizer-on-host"
    ),
]
Weights = Annotated[
    Any,
    _option(
        TRAINING,
        "where the layers' frozen weights live: on the GPU, in host memory (cpu), or there for as "
        "many layers as it takes to fit (auto)",
        **choice_option("device", "cpu", "auto"),
    ),
]
Accumulate = Annotated[
    bool,
    _option(
        TRAINING,
        "plan a step that adds to existing gradients (gradient accumulation)",
        "--accumulate",
    ),
]
Attention = Annotated[
    Any, _option(TIME, "attention kernels on the GPU", **choice_option("cudnn", "flash"))
]
Mixers = Annotated[
    Any,
    _option(
        TIME,
        "code of recurrent and convolutional layers: the kernels of fla, mamba_ssm and "
        "causal_conv1d, plain torch, or the kernels that are installed here",
        **choice_option("kernels", "torch", "installed"),
    ),
]
DeviceRates = Annotated[
    str | None,
    _option(
        TIME,
        f"GPU, for seconds: {', '.join(DEVICES)}, or a file of --measure-device (default: a usual "
        "one with about so much memory, which the plan calls assumed)",
        metavar="NAME",
    ),
]
MeasureDevice = Annotated[
    Path | None,
    _option(
        TIME,
        "measure this machine's rates, write them to a file, and use them; MODEL may be left out",
    ),
]
Kernels = Annotated[
    Any,
    _option(
        TIME,
        "code of norms, gated activations and rotary embeddings: the model's own, Liger's "
        "kernels, compiled regions, or what training takes by default: Liger's if liger-kernel is "
        "installed here (auto)",
        **choice_option("auto", "own", "liger", "compiled"),
    ),
]
NoCache = Annotated[
    bool, _option(OUTPUT, "count anew, and leave nothing for the next plan", "--no-cache")
]
Html = Annotated[
    Path | None,
    _option(
        OUTPUT,
        "also write an interactive page that plans anew for other lengths, memory, trainings and "
        "ranks",
    ),
]
Modules = Annotated[
    bool,
    _option(
        OUTPUT,
        "print the model's modules with their parameters and activations as well",
        "--modules",
    ),
]
CompletionGroup = Annotated[
    Any,
    _option(
        LENGTH,
        "plan that many completions of one prompt instead",
        parser=number_parser(1),
        metavar="ROWS",
    ),
]
Prompt = Annotated[
    Any,
    _option(
        LENGTH,
        "prompt of a group's rows; the rest of --seq-len is completion",
        parser=tokens(),
        metavar="TOKENS",
    ),
]
Lengths = Annotated[
    Path | None,
    _option(
        LENGTH,
        "plan --batch-size rows of a data set instead, padded and packed: a file with the tokens "
        "of each row, one a line",
    ),
]
MeanLength = Annotated[
    Any,
    _option(
        LENGTH,
        "plan --batch-size rows of up to --seq-len tokens, with so many on average",
        parser=tokens(),
        metavar="TOKENS",
    ),
]

FromFile = Annotated[
    list[Path] | None,
    _option(
        MODEL,
        "read model, lengths, adapters, bits and engine from the YAML or JSON of a training (TRL, "
        "axolotl, accelerate); may be repeated",
        "--from",
        metavar="FILE",
    ),
]
DataSet = Annotated[
    Path | None,
    _option(
        LENGTH,
        "also print the hours of a training on a data set: a file with the tokens of each row, one "
        "a line",
        metavar="FILE",
    ),
]
Epochs = Annotated[
    Any,
    _option(
        LENGTH,
        "passes over --dataset",
        parser=number_parser(0.001, 10**6, integers_only=False),
        metavar="N",
    ),
]
Price = Annotated[
    Any,
    _option(
        LENGTH,
        "price of an hour of one GPU, for the money of --dataset",
        parser=number_parser(0, 10**6, integers_only=False),
        metavar="P",
    ),
]

app = typer.Typer(
    no_args_is_help=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _arguments(context: typer.Context) -> SimpleNamespace:
    """Return a namespace with the arguments of the running command, and the command's name as
    `command`."""
    return SimpleNamespace(command=context.info_name, **context.params)


def _version(is_requested: bool) -> None:
    """Print the version of streambp and exit, if `--version` is on the command line. This is the
    callback of that option."""
    if is_requested:
        typer.echo(f"streambp {streambp.__version__}")
        raise typer.Exit


@app.callback()
def streambp_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and exit")
    ] = False,
) -> None:
    """Exact training of HuggingFace models on long sequences."""


@app.command(rich_help_panel="Before training")
def plan(
    context: typer.Context,
    model: PlannedModel = "",
    from_file: FromFile = None,
    trust_remote_code: Trust = False,
    dtype: PlanDtype = "bfloat16",
    seq_len: Longest = "max",
    encoder_len: EncoderLen = None,
    batch_size: Rows = 1,
    group: CompletionGroup = None,
    prompt: Prompt = None,
    lengths: Lengths = None,
    mean_length: MeanLength = None,
    dataset: DataSet = None,
    epochs: Epochs = None,
    price: Price = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    reserve: Reserve = 0.05,
    gpus: Gpus = None,
    ulysses: Ulysses = 1,
    context_parallel: ContextParallel = 1,
    zero: Zero = 0,
    lora: Lora = None,
    lora_targets: LoraTargets = "",
    full: FullTraining = False,
    bits: Bits = 16,
    optimizer_bytes: OptimizerBytes = 12,
    optimizer_on_host: OptimizerOnHost = False,
    weights: Weights = "auto",
    accumulate: Accumulate = False,
    device: DeviceRates = None,
    measure_device: MeasureDevice = None,
    attention: Attention = "cudnn",
    mixers: Mixers = "kernels",
    kernels: Kernels = "auto",
    modules: Modules = False,
    html: Html = None,
    json: Json = False,
    no_cache: NoCache = False,
) -> SimpleNamespace:
    """Estimate memory and time; suggest settings.

    Counts a training step from the model's configuration, without weights and without a GPU. The
    exit code is 0 if a step fits, 1 if no step fits, and 2 if the model could not be counted.
    """
    return _arguments(context)


@app.command(rich_help_panel="Before training")
def verify(
    context: typer.Context,
    model: VerifiedModel,
    random: RandomWeights = False,
    layers: Layers = None,
    trust_remote_code: Trust = False,
    dtype: LoadedModel = "float32",
    device: Device = "",
    seq_len: Length = 512,
    chunk_size: ChunkSize = None,
    saves: Saves = "",
    seed: Seed = 0,
    left_padding: Padding = 0,
    against: ComparedMethods = "",
    top: TopParameters = 20,
    json: Json = False,
) -> SimpleNamespace:
    """Check that gradients match the unpatched model's.

    Compares them parameter by parameter, on random tokens. Exit code 0: exact; 1: not exact; 2: it
    could not be judged.
    """
    return _arguments(context)


@app.command(rich_help_panel="Before training")
def profile(
    context: typer.Context,
    model: Checkpoint,
    trust_remote_code: Trust = False,
    dtype: LoadedModel = "auto",
    device: Device = "",
    seq_len: Length = 8192,
    chunk_size: ChunkSize = None,
    saves: Saves = "",
    offload: Annotated[
        Any, _option(TRAINING, "place where layer inputs wait", **choice_option("none", "cpu"))
    ] = "none",
    snapshot: Annotated[
        Path | None, _option(OUTPUT, "write torch's memory snapshot of the step (CUDA)")
    ] = None,
    html: Annotated[
        Path | None,
        _option(OUTPUT, "also draw the memory of each phase, predicted and measured, as a page"),
    ] = None,
    json: Json = False,
) -> SimpleNamespace:
    """Run one step and compare its memory with the estimate."""
    return _arguments(context)


@app.command(
    rich_help_panel="Training",
    options_metavar="[OPTIONS] -- COMMAND ...",
    context_settings={"allow_extra_args": True},
    help="Stream the models of any training program, unchanged: those of HF Trainer, of what is built on it, and with "
    f"--at train of other loops. Exit code: the program's; {EXIT_UNPATCHED} if it succeeded but no "
    "model was patched.",
)
@add_flags
def launch(
    context: typer.Context,
    allow_unpatched: AllowUnpatched = False,
    install: Annotated[
        bool,
        typer.Option(
            "--install",
            help=f"run nothing; place a file in this environment, with which "
            f"{SETTINGS_VARIABLE}='{{...}}' suffices",
        ),
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="remove that file")] = False,
    **settings: Any,
) -> SimpleNamespace:
    """Return the parsed arguments of `streambp launch`. Each field of `StreamConfig` is an option
    as well. Words of the command line that are no options are in the attribute `extra`: the caller
    raises an error that names them."""
    return SimpleNamespace(extra=context.args, **vars(_arguments(context)))


@app.command(rich_help_panel="Help")
def env(context: typer.Context, json: Json = False) -> SimpleNamespace:
    """Print versions, devices and kernels, for a bug report."""
    return _arguments(context)
