"""Every rule of lazy logits has a mutant, and every mutant turns a named test red.

covers: lazy/backward.py, lazy/dispatch.py, lazy/expression.py, lazy/head.py, lazy/base.py,
  lazy/loss_rules.py, lazy/row_rules.py, head/version_check.py, lazy/tensor.py, model/causal_lm.py
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from streambp.errors import StreamBPError
from streambp.head import version_check
from streambp.lazy import backward as sweep
from streambp.lazy import base, loss_rules, row_rules
from streambp.lazy import dispatch as lazy
from streambp.lazy import expression as rows
from streambp.lazy import head as hub
from streambp.lazy import tensor as lazy_rows
from streambp.model import causal_lm
from tests.head.losses_on_logits import FRAMEWORKS
from tests.lazy import test_lazy, test_lazy_labels
from tests.lazy import test_lazy_like_torch as like_torch
from tests.lazy.test_lazy import COMPLETE_TENSOR_USES, OTHER_USES, WRITES, check, step_is_refused

pytestmark = pytest.mark.usefixtures("float64_oracle")


def without(field):
    """Gradients that are left, less one."""

    def leave(self, gradient, real=hub.LazyHead.store_gradients):
        has_statistics = isinstance(gradient, sweep.StatisticsGradient)
        real(self, dataclasses.replace(gradient, **{field: None}) if has_statistics else gradient)

    return leave


def always_free(self, gradient, real=sweep.StatisticsTerm.add):
    self.labels.fill_(-1)
    real(self, dataclasses.replace(gradient, unique=True))


def of_any_backward(self, gradient):
    self._gradients.setdefault(0, []).append(gradient)


def first_ones(self, reading):
    count = reading.positions.numel()
    statistics = self._statistics.get(reading.projection)
    return None if statistics is None else (statistics[0][:count], statistics[1][:count])


def shifted(node, change, unique=True, real=rows.map_tokens):
    return real(node, lambda x: change(x.roll(1, 0)), unique)


def unseen(self, result, real=lazy_rows.LazyLogits.become):
    real(self, result)
    self.memory.writes -= 1


def first_block_alone(self, total, product, positions, block, real=sweep.NodeTerm.add_to):
    if not block.start:
        real(self, total, product, positions, block)


def cut_off(output, record, real=causal_lm._hand_out):
    with torch.no_grad():
        return real(output, record)


def beside_the_loss():
    test_lazy_labels.compare(test_lazy_labels.dpo)


def late_by_an_engine():
    try:
        test_lazy_labels.hooked_late_by_an_engine(test_lazy_labels.dpo)
    except StreamBPError as error:
        raise AssertionError("refused") from error


@functools.cache
def gradient_of(name):
    return lambda: check(FRAMEWORKS[name])


@functools.cache
def check_of(name):
    return lambda: check(OTHER_USES[name])


@functools.cache
def builds(name):
    return lambda: check(COMPLETE_TENSOR_USES[name], expected=test_lazy.BUILDS)


def is_refused(loss):
    def run():
        assert step_is_refused(loss)

    return run


def lost(program):
    def run():
        assert like_torch.program_is_refused(program)

    return run


def several_blocks():
    with pytest.MonkeyPatch.context() as patch:
        test_lazy.in_several_blocks(FRAMEWORKS["grpo"], patch)


def is_refused_after_a_step():
    assert test_lazy.weights_changed()


def is_refused_before_backward():
    assert test_lazy.changed_before_backward()


def left_in_one_place(monkeypatch):
    monkeypatch.setattr(hub.LazyHead, "take_gradients", lambda self: self._gradients.pop(0, []))


MUTANTS = {
    "a label's logit without its gradient": (hub.LazyHead, "store_gradients", without("pick"),
        gradient_of("dpo")),
    "a logsumexp without its gradient": (hub.LazyHead, "store_gradients", without("lse"),
        gradient_of("dpo")),
    "a mean without its gradient": (hub.LazyHead, "store_gradients", without("mean"),
        check_of("smoothed")),
    "a second label of a token instead of the first": (
        sweep.StatisticsTerm, "add", always_free, check_of("the same token twice"),
    ),
    "a token that is taken twice counted once": (sweep.StatisticsTerm, "add", always_free, check_of("repeated")),
    "functions of rows without a gradient": (sweep.NodeTerm, "add_to", lambda *args: None, gradient_of("grpo")),
    "functions of the first block's rows alone": (sweep.NodeTerm, "add_to", first_block_alone, several_blocks),
    "gradients through what was detached": (row_rules, "_node_with_gradient", lambda x,
        graded: x.node, check_of("constant")),
    "a temperature that is forgotten": (
        lazy, "scale", None, gradient_of("grpo"),
    ),
    "other tokens": (lazy_rows, "map_tokens", shifted, gradient_of("dpo")),
    "statistics of other tokens": (hub.LazyHead, "known_statistics", first_ones, gradient_of("dpo")),
    "smoothing left out": (
        loss_rules, "_smoothed_loss", lambda rows, labels, smoothing,
        real=loss_rules._smoothed_loss: real(rows, labels, 0.0),
        check_of("smoothed"),
    ),
    "a logarithm of probabilities taken for logits": (
        row_rules, "match_log_softmax", lambda node: None if not hasattr(node,
            "args") else (rows.readings(node)[0], 1.0),
        gradient_of("entropy_from_softmax"),
    ),
    "signs left out": (
        row_rules, "match_log_softmax",
        lambda node,
        real=row_rules.match_log_softmax: None if real(node) is None else (real(node)[0], 1.0),
        gradient_of("label_smoothing"),
    ),
    "writes unseen by others": (lazy_rows.LazyLogits, "become", unseen, is_refused(WRITES["through a part"])),
    "writes through real tensors unseen": (
        lazy_rows.SharedWriteCount, "track_alias", lambda self, tensor: None,
        is_refused(WRITES["through data"]),
    ),
    "writes by a Function unseen": (
        lazy_rows.LazyLogits, "latest", lambda self, _: self.current(), lost(like_torch.written_by_a_function),
    ),
    "hooks that see nothing": (base, "TENSOR_HOOKS", (), lost(like_torch.hooked_afterwards)),
    "what was made of logits forgotten": (base, "note_use", lambda *_: None, lost(like_torch.asked_for)),
    "hooks that a Function passes by": (lazy_rows, "TENSOR_HOOKS", (), lost(like_torch.hooked_before_a_function)),
    "a mask as it is later": (rows.TensorOperand, "check", lambda self: None,
        is_refused(test_lazy.changed_mask)),
    "weights as they are later": (hub.LazyHead, "check", lambda self: None, is_refused_after_a_step),
    "weights written by a pointer": (
        version_check.VersionCheck, "changed_tensor", lambda self: None, is_refused_before_backward,
    ),
    "what a Function does with the gradient": (
        lazy_rows.LazyLogits, "has_own_node", lambda self: True, builds("autograd.Function that returns logits"),
    ),
    "gradients of all values lost": (
        lazy_rows.GradientSink, "backward", staticmethod(lambda ctx, _: (None,) * len(ctx.needs_input_grad)),
        builds("autograd.Function"),
    ),
    "engines' nodes not run": (lazy_rows.LazyLogits, "follow_engine_node", lambda self: None,
        test_lazy.run_engines),
    "a hub that keeps what reads it": (
        hub.LazyHead, "read",
        lambda self, *args, real=hub.LazyHead.read: setattr(self, "kept", real(self, *args)) or self.kept,
        lambda: test_lazy.test_nothing_is_held_by_a_cycle(FRAMEWORKS["dpo_with_metrics"]),
    ),
    "engines' hooks that are not called": (lazy.LazyLogits, "hook", None, test_lazy.hooked_by_an_engine),
    "engines' hooks taken for a program's": (base, "is_scaling_hook", lambda hook: False,
        late_by_an_engine),
    "logits beside the loss without a gradient": (causal_lm, "_hand_out", cut_off, beside_the_loss),
    "gradients of an earlier backward": (hub.LazyHead, "store_gradients", of_any_backward,
        test_lazy.left_behind),
}  # fmt: skip


@functools.cache
def green(run):
    """Without a mutant; once for all mutants of a check."""
    run()


@pytest.mark.fast(9)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_test_red(name, monkeypatch):
    owner, attribute, mutant, run = MUTANTS[name]
    green(run)
    if name == "gradients of an earlier backward":
        left_in_one_place(monkeypatch)
    if attribute == "hook":
        monkeypatch.setitem(lazy.LazyLogits.rules, "register_hook", lambda x, hook: None)
    elif mutant is None:
        for name in lazy.SCALING_OPERATIONS:
            monkeypatch.setitem(
                lazy.ROW_RULES, name, lambda name, func, args, kwargs: args[0].copy_with()
            )
    else:
        monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(AssertionError):
        run()
