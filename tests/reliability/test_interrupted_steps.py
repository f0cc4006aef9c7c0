"""A step that ends early, at any operation and at any bytecode: nothing stays switched, and the
next step is exact.

covers: layer/function.py, layer/recompute.py, instance_forward.py, model/wrappers.py, model/causal_lm.py
"""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import pickle
import re
import signal
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import streambp
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, step
from tests.offload.test_limits import Device
from tests.reliability.hostile import drawn
from tests.reliability.signal_places import Interrupt
from tests.tiers import thinned

SETTINGS = {
    "plain": {"saves": ()},
    "saves": {"saves": ("attn_out", "kv")},
    "products": {"saves": ("attn_out", "mlp.*")},
    "auto": {"saves": "auto", "unpatched_runs": False},
    "one chunk": {"saves": "auto", "unpatched_runs": False, "chunk_size": LENGTH},
    "offload": {"saves": ("attn_out", "kv"), "offload": "cpu"},
    "tiles": {"saves": ("attn_out", "kv"), "offload": "cpu", "gpu_memory": 1},
}


# Functions that replace a model's weights, forwards or settings for a while.
RESTORES = re.compile(r"replace$|swap_forwards|use_buffers|route_attention|disable_checkpointing")


class FailingMode(TorchDispatchMode):
    """Raises at an operation of a step, once; counts them."""

    def __init__(self, at=None, error=None):
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise self.error
        return function(*args, **(kwargs or {}))


def switches(model):
    """All that a step may switch, as it is now."""
    modules = [
        (name, type(module), module.training, {key: id(p) for key, p in module._parameters.items()},
         {key: id(value) for key, value in vars(module).items() if key in ("forward", "_streambp")},
         [len(getattr(module, table)) for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")])
        for name, module in model.named_modules()
    ]  # fmt: skip
    state = model._streambp.running if hasattr(model, "_streambp") else None
    ours = state and [
        state.bypass,
        state.shards,
        state.packed_rows,
        state.tree,
        state.defer_norm,
        state.deferring,
    ]
    return (
        modules, ours, model.config._attn_implementation, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
        torch._C._autograd._top_saved_tensors_default_hooks(True), torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(), sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
    )  # fmt: skip


class Subject:
    """A streamed model, its gradients, and what is switched between steps."""

    def __init__(self, setting):
        config = streambp.StreamConfig(**{"chunk_size": 5, **SETTINGS[setting]})
        self.model = streambp.patch(build("qwen3"), config)
        self.expected = [step(self.model) for _ in range(3)][-1]
        with FailingMode() as counting:
            step(self.model)
        self.operations = counting.count
        self.initial_switches = switches(self.model)


def interrupted(at):
    return FailingMode(at, KeyboardInterrupt())


def without_memory(at):
    """At the first operation from there on that allocates: what has begun to add up in place is not
    done again."""
    return Device(fails_at=at)


ERRORS = {
    "out of memory": (torch.OutOfMemoryError, without_memory),
    "interrupt": (KeyboardInterrupt, interrupted),
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("positions", thinned([3, 40], lambda positions: positions == 3))
@pytest.mark.parametrize("setting", thinned(SETTINGS, lambda setting: setting == "auto"))
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_an_operation(error, setting, positions, record_property):
    subject, (kind, failing) = Subject(setting), ERRORS[error]
    first = drawn(7).randrange(subject.operations // positions)
    ats = range(1 + first, subject.operations, subject.operations // positions)
    ended = 0
    for at in ats:
        with failing(at):
            try:
                result = step(subject.model)
            except kind:
                result, ended = None, ended + 1
        if result is not None:
            assert_same(result, subject.expected)
        gc.collect()
        assert switches(subject.model) == subject.initial_switches, at
        assert_same(step(subject.model), subject.expected)
    assert ended > 0 or error == "out of memory"
    record_property("cases", len(ats))


@pytest.mark.fast(1)
@pytest.mark.parametrize("places", thinned([10, 300], lambda places: places == 10))
@pytest.mark.parametrize("setting", thinned(SETTINGS, lambda setting: setting == "one chunk"))
def test_an_interrupt_where_python_handles_signals(setting, places, record_property):
    """An interrupt may come while the model's own weights, forwards and settings are put back."""
    subject, choose = Subject(setting), drawn(9)
    with Interrupt() as counting:
        step(subject.model)
    ends = [place for place in counting.counts if RESTORES.search(place[0].co_qualname)]
    drawn_places = choose.sample(sorted(counting.counts, key=str), places) + ends
    raised = 0
    for place in drawn_places:
        occurrence = choose.randint(1, counting.counts[place])
        with contextlib.suppress(KeyboardInterrupt), Interrupt(place, occurrence) as interrupt:
            step(subject.model)
        raised += interrupt.raised
        gc.collect()
        assert switches(subject.model) == subject.initial_switches, (place, occurrence)
        assert_same(step(subject.model), subject.expected)
    assert raised > len(drawn_places) // 2
    record_property("cases", len(drawn_places))


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
@pytest.mark.parametrize("times", thinned([4, 30], lambda times: times == 4))
@pytest.mark.parametrize("setting", thinned(SETTINGS, lambda setting: setting == "auto"))
def test_an_interrupt_at_any_bytecode(setting, times, record_property):
    """A timer's, as Ctrl-C's: wherever it comes, what it left behind goes with its frames."""
    subject, choose = Subject(setting), drawn(8)
    start = time.perf_counter()
    step(subject.model)
    longest = time.perf_counter() - start
    previous_handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-4, longest))
                step(subject.model)
                time.sleep(longest)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            assert switches(subject.model) == subject.initial_switches
            assert_same(step(subject.model), subject.expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
    record_property("cases", times)


class HookError(Exception):
    pass


def raises(*_):
    raise HookError


MODULE_NAMES = ("", "model", "model.embed_tokens", "model.layers.0",
    "model.layers.1.input_layernorm", "model.layers.1.mlp",
         "model.layers.0.self_attn.q_proj", "model.norm", "lm_head")  # fmt: skip
INTERRUPTED_PLACES = {
    **{f"before {part or 'the model'}": lambda model, part=part: model.get_submodule(part).register_forward_pre_hook(raises)
       for part in MODULE_NAMES[1:]},
    **{f"after {part or 'the model'}": lambda model, part=part: model.get_submodule(part).register_forward_hook(raises)
       for part in MODULE_NAMES[:4]},
    "backward of a layer": lambda model: model.model.layers[0].register_full_backward_hook(raises),
    "backward inside a layer": lambda model: model.model.layers[0].mlp.register_full_backward_hook(raises),
    "a parameter's gradient": lambda model: model.model.layers[1].mlp.up_proj.weight.register_hook(raises),
    "a parameter's .grad": lambda model: model.lm_head.weight.register_post_accumulate_grad_hook(raises),
    "the head's gradient": lambda model: model.lm_head.weight.register_hook(raises),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "setting", thinned(["plain", "auto", "offload"], lambda setting: setting == "auto")
)
def test_a_users_hook_raises(setting, record_property):
    subject = Subject(setting)
    uncalled_hooks = []
    for hook_name, register in INTERRUPTED_PLACES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hooks that do not see gradients
            hook = register(subject.model)
            try:
                step(subject.model)
                uncalled_hooks.append(hook_name)
            except HookError:
                pass
            hook.remove()
        gc.collect()
        assert switches(subject.model) == subject.initial_switches, hook_name
        assert_same(step(subject.model), subject.expected)
    # the logits are never built, nor is the final norm called
    assert len(uncalled_hooks) <= 2, uncalled_hooks
    record_property("cases", len(INTERRUPTED_PLACES) - len(uncalled_hooks))


def loss_of(model, seed=0):
    return model(**make_batch("plain", seed=seed), use_cache=False).loss


def unpatched_between(model):
    loss = loss_of(model)
    streambp.unpatch(model)
    loss.backward()


def unpatched_in_forward(model):
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda *_: streambp.unpatch(model) and None
    )
    try:
        loss_of(model).backward()
    finally:
        hook.remove()


def unpatched_in_backward(model):
    loss = loss_of(model)
    hook = model.model.layers[1].mlp.up_proj.weight.register_hook(
        lambda gradient: streambp.unpatch(model) and None
    )
    try:
        loss.backward()
    finally:
        hook.remove()


def unpatched_in_an_accumulation(model):
    loss_of(model, 1).backward()
    streambp.unpatch(model)
    loss_of(model).backward()


def copied(model):
    loss = loss_of(model)
    clone = copy.deepcopy(model)
    loss.backward()
    assert_same(step(clone), step(model))


def pickled(model):
    loss = loss_of(model)
    clone = pickle.loads(pickle.dumps(model))
    loss.backward()
    assert_same(step(clone), step(model))


def saved(model):
    loss = loss_of(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss.backward()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def forked(model):
    """A worker, as DataLoader starts them, in the middle of a step."""
    loss = loss_of(model)
    worker = multiprocessing.get_context("fork").Process(target=_works, args=(model,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    loss.backward()


def _works(model):
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert str(streambp.describe(model))


INTERMEDIATE_ACTIONS = (
    unpatched_between, unpatched_in_forward, unpatched_in_backward, unpatched_in_an_accumulation, copied, pickled, saved,
    forked,
)  # fmt: skip


@pytest.mark.fast("copied", "unpatched_in_backward")
@pytest.mark.parametrize("program", INTERMEDIATE_ACTIONS, ids=lambda program: program.__name__)
def test_what_programs_do_between(program, record_property):
    """They end, or raise what says why; after it the model computes what it did, patched or not."""
    subject = Subject("saves")
    with contextlib.suppress(*([streambp.StreamBPError] if "unpatch" in program.__name__ else [])):
        program(subject.model)
    if not hasattr(subject.model, "_streambp"):
        assert not any("forward" in module.__dict__ for module in subject.model.modules())
        streambp.patch(subject.model, streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv")))
    assert_same(step(subject.model), subject.expected)
    record_property("cases", 1)


def test_what_is_compared_notices_a_slot_that_stays_switched():
    subject = Subject("plain")
    projection = subject.model.model.layers[0].mlp.up_proj
    projection._parameters["weight"] = nn.Parameter(projection.weight.detach())
    assert switches(subject.model) != subject.initial_switches
