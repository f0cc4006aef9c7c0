"""peft's adapters of experts inside a layer, added to the weight once for each pass.

transformers stores the weights of a layer's experts as one parameter [E, n, m]. peft adapts the
parameter by a parametrization. The experts build a new weight W + s B A in each call, and backward
builds a gradient of the same size. A streamed layer calls its experts once for each chunk.

While a streamed layer runs, a `FactoredWeight` takes the weight's place. The object contains the
factors, and the sum that peft would compute. The sum is made once for all chunks of a pass. The
experts' own code reads the object, selects experts and multiplies. Outputs and gradients of inputs
are therefore those of peft, to the bit. Gradients of the factors are skinny products, so no
gradient of the sum is made. One class serves all families, because the experts' code is unchanged.
An operation that is no product makes the sum's gradient, and `describe` prints the operation.
A weight in 4 bits is decoded for the sum, and the decoded weight is freed.

Products with W and with the factors one by one would need no sum. Such products round three times
in bfloat16 where peft rounds twice: the error is up to 1.4 times peft's. Adding two outputs for
each chunk also takes longer than one sum for each pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from streambp.device import autocast_dtype, without_autocast
from streambp.errors import UnsupportedModelError
from streambp.fingerprint.observed_values import version_of
from streambp.foreign import home_of
from streambp.known_names import ADAPTER_ACTIVATION, EXPERTS_IMPLEMENTATION, LORA_LAYERS
from streambp.layer.packed_experts import PackedWeight, packed_weight
from streambp.layer.products import TENSOR_TYPES
from streambp.offload.decoded_weights import FORWARD

# float16 is left out: products with A may underflow
EXPERT_WEIGHT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
# The experts' implementations whose operations Python code calls. Other ones pass the weight's
# memory to a kernel. None stands for experts without a choice of implementations.
EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", None)
# grouped_mm reads rows and columns that are so many bytes long, or a multiple
ROW_ALIGNMENT_BYTES = 16
TORCH_LINEAR = torch._C._nn.linear
PRODUCT_FUNCTIONS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm)
MATMUL_METHOD = "__matmul__"  # read at each call, because tests replace Tensor's
GROUPED_PRODUCT_FUNCTIONS = tuple(
    vars(home)[name]
    for home, name in ((F, "grouped_mm"), (torch, "_grouped_mm"))
    if name in vars(home)
)
METADATA_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad",
    "is_sparse", "is_quantized", "is_nested",
)  # fmt: skip
METADATA_FUNCTIONS = (
    *(vars(torch._C.TensorBase)[name].__get__ for name in METADATA_ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point),
    *(Tensor.element_size, Tensor.is_contiguous),
)
TRANSPOSE_FUNCTIONS = (Tensor.transpose, torch.transpose)
MATRIX_TRANSPOSE, FULL_TRANSPOSE = (vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T"))
Multiply = Callable[[Tensor, Tensor], Tensor]


class FactoredWeight(Tensor):
    """Tensor subclass for a weight with LoRA adapters: base + sum of scale * left @ right over the
    adapters. The shape is [E, n, m] for all E experts, or [n, m] for one expert. Operations on the
    weight read the sum. The backward of these operations computes gradients of the factors left and
    right, and none of the weight.

    Attributes:
        folded: the sum, [E, n, m], without a graph.
        left_factor: [E, n, r], the left factors of all adapters, side by side; r: the sum of ranks.
        right_factor: [E, r, m], the right factors of all adapters, one below the other.
        scales: (rank, scale) of each adapter, in the order of the factors.
        record_operation: callback: gets the name of an operation that is no product. The backward
            of such an operation computes the gradient of `folded` itself, as large as the weight.
        needs_graph: True if operations on the weight must give gradients to the factors.
    """

    folded: Tensor
    left_factor: Tensor
    right_factor: Tensor
    scales: list[tuple[int, float]]
    record_operation: Callable[[str], None]
    needs_graph: bool
    _experts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    _plain: Tensor | None

    @staticmethod
    def create(
        folded: Tensor,
        left_factor: Tensor,
        right_factor: Tensor,
        scales: list[tuple[int, float]],
        tell: Callable[[str], None],
    ) -> FactoredWeight:
        """Return a `FactoredWeight` of all E experts, [E, n, m], or of one expert, [n, m]. r is the
        sum of the adapters' ranks.

        Args:
            folded: [E, n, m] or [n, m], the frozen weight plus scale * left @ right of each
                adapter. The forward of a product reads this sum, and not the factors.
            left_factor: left of all adapters side by side, [E, n, r] or [n, r].
            right_factor: right of all adapters one below the other, [E, r, m] or [r, m].
            scales: (rank, scale) of each adapter, in the order of the factors.
            tell: callback for the attribute `record_operation`: gets the name of an operation that
                is no product.
        """
        weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            FactoredWeight,
            folded.shape,
            strides=folded.stride(),
            dtype=folded.dtype,
            layout=folded.layout,
            device=folded.device,
        )
        weight.folded = folded
        weight.left_factor = left_factor
        weight.right_factor = right_factor
        weight.scales = scales
        weight.record_operation = tell
        weight.needs_graph = torch.is_grad_enabled() and (
            left_factor.requires_grad or right_factor.requires_grad
        )
        weight._experts = None
        weight._plain = None
        return weight  # type: ignore[no-any-return]

    def part(self, folded: Tensor, left_factor: Tensor, right_factor: Tensor) -> FactoredWeight:
        """Return a `FactoredWeight` [..., n, m] of other tensors, with the scales and
        `record_operation` of this weight. Called with the parts of one expert, for example.

        Args:
            folded: the sum of weight and adapters, [..., n, m].
            left_factor: the left factors of all adapters, [..., n, r].
            right_factor: the right factors of all adapters, [..., r, m].
        """
        return FactoredWeight.create(
            folded, left_factor, right_factor, self.scales, self.record_operation
        )

    def to_tensor(self) -> Tensor:
        """Return the weight as a plain tensor, [E, n, m] or [n, m]. The tensor has a graph through
        which its gradient reaches the factors. Later calls return the same tensor."""
        if self._plain is None:
            product = ProductRule(self.folded, self.scales, torch.matmul, torch.matmul)
            self._plain = UnfactoredWeight.apply(product, self.left_factor, self.right_factor)  # type: ignore[no-untyped-call]
        return self._plain  # type: ignore[return-value]

    def expert(self, index: int) -> FactoredWeight:
        """Return the weight [n, m] of one expert. The first call splits the factors of all experts
        by `unbind`, because the backward of an index would write zeros for all other experts."""
        if self._experts is None:
            self._experts = (self.left_factor.unbind(0), self.right_factor.unbind(0))
        left_factors, right_factors = self._experts
        return self.part(self.folded[index], left_factors[index], right_factors[index])

    def swap_dims(self) -> FactoredWeight:
        """Return a `FactoredWeight` with the last two dimensions of this weight swapped, for
        transpositions and F.linear."""
        return self.part(self.folded.mT, self.right_factor.mT, self.left_factor.mT)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return func(*args, **kwargs). A product is computed by `ExpertProduct`. An index or a
        transposition returns a `FactoredWeight`. Any other function gets plain tensors instead of
        the factored weights.

        Raises:
            UnsupportedModelError: gradients are off, as in the forward of an autograd Function, so
                that the factors would get no gradient. A test run of the layer finds this error.
        """
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not torch.is_grad_enabled():
            _refuse_without_graph((*args, *kwargs.values()), func)
        result = _compute(func, args, kwargs)
        if result is not NotImplemented:
            return result
        name = getattr(func, "__name__", str(func))
        return func(*_replace_weights(args, name), **_replace_weights(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise UnsupportedModelError: an operation that bypasses `__torch_function__` would give
        no gradient to the factors. A test run of the layer finds such an operation."""
        raise UnsupportedModelError(
            f"The experts call {func} in a way that hides it from torch functions, so their "
            "adapters cannot be computed from factors. "
            'Pass kernels="own" to use the adapter library\'s code.'
        )


@dataclasses.dataclass(eq=False)
class ProductRule:
    """A matrix product of a tensor with the weight of experts that have LoRA adapters. Contains the
    functions by which `ExpertProduct` computes the product in forward, and in backward the
    gradients of the adapters' factors left and right.

    Attributes:
        folded: the sum of the weight and its adapters, [..., n, m].
        scales: (rank, scale) of each adapter.
        multiply: function of a tensor and a weight or factor: returns their product.
        gather: function of two tensors: returns their product summed over the tokens. Computes the
            gradient of a factor.
        weight_first: True: the product is weight @ tensor; False: tensor @ weight.
        pads: True if `multiply` needs rows of a multiple of `ROW_ALIGNMENT_BYTES` bytes, so that
            the factors' rank is padded with zeros.
    """

    folded: Tensor
    scales: list[tuple[int, float]]
    multiply: Multiply
    gather: Multiply
    weight_first: bool = False
    pads: bool = False

    def scale_gradients(self, left_factor: Tensor, right_factor: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply gradients of the factors by the adapters' scales in place, and return them.

        Args:
            left_factor: the gradient of the left factor, [..., n, r].
            right_factor: the gradient of the right factor, [..., r, m].
        """
        start = 0
        for rank, scale in self.scales:
            left_factor.narrow(-1, start, rank).mul_(scale)
            right_factor.narrow(-2, start, rank).mul_(scale)
            start += rank
        return left_factor, right_factor


class ExpertProduct(torch.autograd.Function):
    """Autograd function of a product with the weight of experts: x [..., n, in] -> [..., n, out].
    Backward computes the gradients of x and of the factors."""

    @staticmethod
    def forward(
        ctx: Any, product: ProductRule, x: Tensor, left_factor: Tensor, right_factor: Tensor
    ) -> Tensor:
        """Return the product [..., n, out] of x [..., n, in] and `product.folded`.

        Args:
            product: the rule of the product, with the weight.
            x: [..., n, in].
            left_factor: [..., in, r], for autograd.
            right_factor: [..., r, out], for autograd.
        """
        ctx.product = product
        ctx.save_for_backward(x, left_factor, right_factor)
        with without_autocast(x.device.type):
            return product.multiply(x, product.folded)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        """Return None for `product`, then the gradients of x [..., n, in] and of the left and right
        factors, from the output's gradient `grad` [..., n, out]."""
        product = ctx.product
        x, left_factor, right_factor = ctx.saved_tensors
        rank = left_factor.shape[-1]
        of_x = of_left = of_right = None
        with without_autocast(x.device.type):
            if ctx.needs_input_grad[1]:
                of_x = product.multiply(grad, product.folded.mT)
            if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
                return None, of_x, None, None
            if product.pads:
                left_factor, right_factor = _pad_rank(left_factor, right_factor)
            if product.weight_first:
                of_left = product.gather(grad, product.multiply(x, right_factor).mT)
                of_right = product.gather(product.multiply(grad, left_factor.mT), x.mT)
            else:
                of_left = product.gather(x.mT, product.multiply(grad, right_factor.mT))
                of_right = product.gather(product.multiply(x, left_factor).mT, grad)
            of_left, of_right = of_left.narrow(-1, 0, rank), of_right.narrow(-2, 0, rank)
            return None, of_x, *product.scale_gradients(of_left, of_right)


class UnfactoredWeight(torch.autograd.Function):
    """Autograd function that returns a weight with LoRA adapters [..., n, m] as a plain tensor. Its
    backward turns the weight's gradient into gradients of the adapters' factors."""

    @staticmethod
    def forward(
        ctx: Any, product: ProductRule, left_factor: Tensor, right_factor: Tensor
    ) -> Tensor:
        """Return a view of the weight `product.folded` [..., n, m]. The factors are arguments for
        autograd only."""
        ctx.product = product
        ctx.save_for_backward(left_factor, right_factor)
        return product.folded.view_as(product.folded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        """Return None for `product`, then the gradients of the left and right factors, from the
        weight's gradient `grad` [..., n, m]."""
        product = ctx.product
        left_factor, right_factor = ctx.saved_tensors
        with without_autocast(grad.device.type):
            return None, *product.scale_gradients(grad @ right_factor.mT, left_factor.mT @ grad)


def _refuse_without_graph(values: tuple[Any, ...], func: Any) -> None:
    """Raise if a `FactoredWeight` that must give gradients to its adapters (`needs_graph`) is among
    the arguments of an operation. Called for operations in no_grad mode, whose results have no
    graph to the adapters.

    Args:
        values: the operation's arguments.
        func: the operation, named in the error.

    Raises:
        UnsupportedModelError: one of the values is a `FactoredWeight` with `needs_graph`.
    """
    if any(isinstance(value, FactoredWeight) and value.needs_graph for value in values):
        name = getattr(func, "__name__", str(func))
        raise UnsupportedModelError(
            f"The experts call {name} on an adapted weight where gradients are off, as inside an "
            "autograd function, so their adapters would get no gradient. "
            'Pass kernels="own" to use the adapter library\'s code.'
        )


def _replace_weights(value: Any, operation: str) -> Any:
    """Return an operation's arguments with plain tensors in place of `FactoredWeight`s, and record
    the operation's name for `describe` if there are any.

    Args:
        value: an argument, or a list, tuple or dict of arguments.
        operation: the operation's name.
    """
    if isinstance(value, FactoredWeight):
        value.record_operation(operation)
        return value.to_tensor()
    if type(value) is dict:
        return {key: _replace_weights(item, operation) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_weights(item, operation) for item in value)
    return value


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operation's result, computed from the parts of its `FactoredWeight`. Return
    NotImplemented if the operation is no supported product, index or transposition. The caller then
    runs the operation on plain tensors.

    Args:
        func: the operation, a function of torch.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """
    if func is F.linear:
        return _linear(*args, **kwargs)
    if func in GROUPED_PRODUCT_FUNCTIONS and len(args) == 2:
        return _multiply_groups(func, args[0], args[1], kwargs)
    if (func in PRODUCT_FUNCTIONS or func is getattr(Tensor, MATMUL_METHOD)) and len(args) == 2:
        return NotImplemented if kwargs else _product(args[0], args[1])
    weight = args[0] if args else None
    if not isinstance(weight, FactoredWeight):
        return NotImplemented
    if func is Tensor.__getitem__:
        return _select_experts(weight, args[1])
    last = {weight.dim() - 2, weight.dim() - 1}
    swaps = func is MATRIX_TRANSPOSE or (func is FULL_TRANSPOSE and weight.dim() == 2)
    if func in TRANSPOSE_FUNCTIONS and len(args) == 3:
        swaps = {dim % weight.dim() for dim in args[1:]} == last
    return weight.swap_dims() if swaps else NotImplemented


def _select_experts(weight: FactoredWeight, index: Any) -> Any:
    """Return `weight[index]` as a `FactoredWeight`: one expert's [n, m] for a number, several
    experts' [k, n, m] for a tensor [k] of numbers. NotImplemented for any other index; the plain
    weight is then indexed."""
    if weight.dim() != 3:
        return NotImplemented
    if type(index) is int:
        return weight.expert(index)
    if type(index) is not Tensor or index.dtype not in INDEX_DTYPES:
        return NotImplemented
    if index.dim() == 0:
        return weight.expert(int(index))
    if index.dim() == 1:
        return weight.part(
            weight.folded[index], weight.left_factor[index], weight.right_factor[index]
        )
    return NotImplemented


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, FactoredWeight) or weight.dim() != 2 or bias is not None:
        return NotImplemented
    return _product(x, weight.swap_dims())


def _product(a: Any, b: Any) -> Any:
    """Return a @ b of a `FactoredWeight` and a tensor, in either order. NotImplemented for shapes
    that `ExpertProduct` does not support; the product then runs on plain tensors."""
    weight_first = isinstance(a, FactoredWeight)
    weight, x = (a, b) if weight_first else (b, a)
    if isinstance(x, FactoredWeight) or x.dim() < 2:
        return NotImplemented
    if x.dim() != weight.dim() and (weight_first or weight.dim() == 3):
        return NotImplemented
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x = x.to(dtype)
        weight = weight.part(
            *(
                tensor.to(dtype)
                for tensor in (weight.folded, weight.left_factor, weight.right_factor)
            )
        )
    multiply = _multiply_left if weight_first else torch.matmul
    gather = torch.matmul if x.dim() == weight.dim() else _sum_products
    product = ProductRule(weight.folded, weight.scales, multiply, gather, weight_first)
    return ExpertProduct.apply(product, x, weight.left_factor, weight.right_factor)  # type: ignore[no-untyped-call]


def _multiply_left(x: Tensor, weight: Tensor) -> Tensor:
    """Return weight [..., n, m] @ x [..., m, k]: `ProductRule.multiply` of a product whose left
    operand is the weight."""
    return torch.matmul(weight, x)


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum [m, n] of a [..., m, tokens] @ b [..., tokens, n] over the leading dimensions.
    `ProductRule.gather` of products of a 2-D weight: the gradient of a LoRA factor, if the input
    has leading dimensions that the weight has not."""
    return a.mT.flatten(0, -2).mT @ b.flatten(0, -2)


def _multiply_groups(func: Any, x: Any, weight: Any, kwargs: dict[str, Any]) -> Any:
    """Return the products of each expert's rows of x with the expert's weight, [n, out].
    NotImplemented for unsupported arguments; grouped_mm then gets the plain weight.

    Args:
        func: torch's grouped_mm.
        x: [n, in], the rows sorted by expert.
        weight: [E, in, out].
        kwargs: keyword arguments of grouped_mm; only `offs`, the end of each expert's rows, is
            supported.
    """
    passed_names = {name for name, value in kwargs.items() if value is not None}
    if isinstance(x, FactoredWeight) or weight.dim() != 3 or passed_names != {"offs"}:
        return NotImplemented
    multiply = functools.partial(func, **kwargs)
    product = ProductRule(weight.folded, weight.scales, multiply, multiply, pads=True)
    return ExpertProduct.apply(product, x, weight.left_factor, weight.right_factor)  # type: ignore[no-untyped-call]


@dataclasses.dataclass(eq=False)
class LoraParameter:
    """A parameter of experts with LoRA adapters of peft, and the decision whether a
    `FactoredWeight` may replace the parameter.

    Attributes:
        module: peft's module around the experts, or around another such module.
        why: the reason to call peft's own forward in every call; None: a `FactoredWeight` may
            replace the parameter.
        why_in_call: text about the last call: the reason why peft's forward ran, or the operation
            whose backward computes the gradient of the full weight. None: neither is the case.
    """

    module: Any
    why: str | None = None
    why_in_call: str | None = None

    @property
    def can_be_fused(self) -> bool:
        """Return False. The value is True for a LoRA Linear whose output may be saved or skipped,
        and an adapted parameter of experts has no such output. `LayerState.linears` reads this
        property of both."""
        return False

    def record_operation(self, operation: str) -> None:
        """Record, for `describe`, that the experts' code ran an operation that is no product. The
        operation's backward computes the gradient of the full weight of all experts."""
        self.why_in_call = f"{operation} needs the weight's whole gradient"


def expert_kinds() -> tuple[Any, ...]:
    """Return peft's class of modules that adapt a parameter (`ParamWrapper`), as a tuple; () if
    peft is not imported, or has no such class."""
    library = sys.modules.get(LORA_LAYERS)
    kind = getattr(library, "ParamWrapper", None)
    return () if kind is None else (kind,)


def read_experts(module: Any) -> LoraParameter | None:
    """Return one of peft's adapted parameters of experts as a `LoraParameter`, with the reason not
    to replace peft's forward, if any; None if no adapter is active.

    Args:
        module: peft's module around the experts.
    """
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return None
    return LoraParameter(module, why=_why_not(module, names))


def _why_not(module: Any, names: list[str]) -> str | None:
    """Return the reason, as text for `describe`, to call peft's own forward of this module; None: a
    `FactoredWeight` may replace the weight of the experts.

    Args:
        module: peft's module around the experts.
        names: names of the active adapters.

    Raises:
        UnsupportedModelError: the weight was stored in 4 bits after `streambp.patch`.
    """
    if home_of(type(module).forward) != LORA_LAYERS or FORWARD in vars(module):
        return "its forward is another's"
    if not hasattr(module, "get_delta_factors"):
        return "this version of peft multiplies its factors"
    if module.num_experts == 1:
        return "it is a single matrix"
    experts = module.get_base_layer()
    if FORWARD in vars(experts):
        return "the experts' forward is another's"
    weight = stored_weight(module)
    if weight is None:
        return "its weight is parametrized"
    if isinstance(weight, PlainWeight) and type(weight.source) not in TENSOR_TYPES:
        return f"its weight is a {type(weight.source).__name__}"
    if isinstance(weight, PackedWeight) and ADAPTER_ACTIVATION not in vars(module):
        raise UnsupportedModelError(
            f"{module.parameter_name} was stored in 4 bits after streambp.patch, and peft does not "
            "remove an adapter from such a weight after a forward. "
            "Call streambp.patch again after the experts are stored in 4 bits."
        )
    if weight.dtype not in EXPERT_WEIGHT_DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if not all(isinstance(module.scaling[name], int | float) for name in names):
        return "its scale is no number"
    return None


@dataclasses.dataclass(eq=False)
class PlainWeight:
    """A parameter of experts, and a context manager by which the experts read another tensor in its
    place. `PackedWeight` has the same methods for weights in 4 bits.

    Attributes:
        module: the experts.
        name: name of the parameter in `module`.
    """

    module: Any
    name: str

    @property
    def source(self) -> Tensor:
        """Return the parameter [E, n, m]. The class for 4-bit weights, `PackedWeight`, returns its
        packed bytes instead."""
        parameter: Tensor = self.module._parameters[self.name]
        return parameter

    @property
    def dtype(self) -> torch.dtype:
        """Return the parameter's dtype."""
        return self.source.dtype

    def value(self) -> Tensor:
        """Return the parameter [E, n, m] without a copy. The class for 4-bit weights,
        `PackedWeight`, returns a decoded copy instead."""
        return self.source

    @contextlib.contextmanager
    def replace(self, value: Tensor) -> Iterator[None]:
        """Context manager in which the experts read `value` [E, n, m] as their weight."""
        attributes = vars(self.module)
        attributes[self.name] = value
        try:
            yield
        finally:
            del attributes[self.name]


def stored_weight(module: Any) -> PlainWeight | PackedWeight | None:
    """Return the weight of experts that peft's module adapts: a parameter, or a weight in 4 bits.
    None for other parametrized weights. Also None if the experts' module has an attribute of the
    weight's name, because the experts would read this attribute.

    Args:
        module: peft's module around the experts.
    """
    experts = module.get_base_layer()
    name = module.parameter_name
    if name in vars(experts):
        return None
    if experts._parameters.get(name) is None:
        return packed_weight(experts, name)
    return PlainWeight(experts, name)


@dataclasses.dataclass(eq=False)
class FactoredExperts:
    """Replacement for the forward of one of peft's modules with an adapted parameter of experts,
    while the decoder layer runs. The experts then read a `FactoredWeight`: the sum of the weight
    and its adapters, with gradients for the adapters alone.

    Attributes:
        lora_parameter: the parameter.
        peft_forward: peft's forward, called with (module, x, ...).
        folded: the sum of the weight and its adapters, [E, n, m]; None before the first call.
        sources: pairs (tensor, version counter) of the stored weight and the adapters' matrices of
            which `folded` was made. If a tensor was changed or replaced since, `folded` is made
            again.
    """

    lora_parameter: LoraParameter
    peft_forward: Callable[..., Any]
    folded: Tensor | None = None
    sources: tuple[tuple[Tensor, int | None], ...] = ()

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the experts' output for x [..., in] and the experts' further arguments, `args` and
        `kwargs`. Run peft's own forward if `adapter_names` is passed, or if no `FactoredWeight` can
        replace the weight in this call, for the reason in `lora_parameter.why_in_call`."""
        module = self.lora_parameter.module
        weight = stored_weight(module)
        assert weight is not None
        self.lora_parameter.why_in_call = _why_not_in_call(module, weight)
        if self.lora_parameter.why_in_call is not None or kwargs.get("adapter_names"):
            return self.peft_forward(module, x, *args, **kwargs)
        adapters = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
        sources = [weight.source]
        for adapter in adapters:
            for table in (module.lora_A, module.lora_B):
                sources.append(table[adapter].weight)
        folded = self.folded if self._is_made_of(sources) else None
        base = weight.value() if folded is None else folded
        with weight.replace(base):  # factors are cast to the dtype of the weight that peft reads
            factors = [module.get_delta_factors(adapter) for adapter in adapters]
            if folded is None:
                with torch.no_grad():
                    folded = folded_weight(module, base, adapters)
                self.folded = folded
                self.sources = tuple((source, version_of(source)) for source in sources)
        left_factor = torch.cat([adapter_factors[0] for adapter_factors in factors], -1)
        right_factor = torch.cat([adapter_factors[1] for adapter_factors in factors], -2)
        scales = [
            (adapter_factors[0].shape[-1], float(adapter_factors[2])) for adapter_factors in factors
        ]
        del base  # the decoded weight of experts in 4 bits
        with weight.replace(
            FactoredWeight.create(
                folded, left_factor, right_factor, scales, self.lora_parameter.record_operation
            )
        ):
            return module.base_layer(x, *args, **kwargs)

    def _is_made_of(self, sources: list[Tensor]) -> bool:
        """True if `folded` is the sum of these tensors with their present values."""
        return (
            self.folded is not None
            and len(sources) == len(self.sources)
            and all(
                source is earlier and version_of(source) == version
                for source, (earlier, version) in zip(sources, self.sources, strict=True)
            )
        )


def _why_not_in_call(module: Any, weight: PlainWeight | PackedWeight) -> str | None:
    """Return the reason, as text for `describe`, to call peft's own forward in this call alone;
    None: a `FactoredWeight` may replace the weight.

    Args:
        module: peft's module.
        weight: the weight that the module adapts.
    """
    if F.linear is not TORCH_LINEAR:  # an autograd function would get no gradient for the factors
        return "torch's function for Linears is replaced, as ZeRO-3 does"
    config = getattr(module.get_base_layer(), "config", None)
    implementation = getattr(config, EXPERTS_IMPLEMENTATION, None)
    if implementation not in EXPERTS_IMPLEMENTATIONS:
        return f"the experts run {implementation}"
    if weight.source.requires_grad:
        return "its weight is trained"
    if autocast_dtype(weight.source.device.type) == torch.float16:
        return "it is computed in float16"
    return None


def folded_weight(module: Any, base: Tensor, adapters: list[str]) -> Tensor:
    """Return the sum of a weight and its adapters [E, n, m], computed with the operations of peft,
    so that the sum is bitwise equal to peft's.

    Args:
        module: peft's module.
        base: the frozen weight, [E, n, m].
        adapters: names of the active adapters.
    """
    if len(adapters) == 1 and module.num_experts > 1:
        left_factor, right_factor, scale = module.get_delta_factors(adapters[0])
        with without_autocast(base.device.type):
            return torch.baddbmm(base, left_factor, right_factor, alpha=scale)
    delta = module.get_delta_weight(adapters[0])
    for adapter in adapters[1:]:
        delta = delta + module.get_delta_weight(adapter)
    return base + delta


def _pad_rank(left_factor: Tensor, right_factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return left [E, n, r] and right [E, r, m] as contiguous factors [E, n, r'] and [E, r', m],
    padded with zeros along the rank. Rows of r' entries have a multiple of `ROW_ALIGNMENT_BYTES`
    bytes, as grouped_mm needs. The product of both factors is unchanged."""
    ranks = ROW_ALIGNMENT_BYTES // left_factor.element_size()
    extra_ranks = -left_factor.shape[-1] % ranks
    if extra_ranks:
        left_factor = F.pad(left_factor, (0, extra_ranks))
        right_factor = F.pad(right_factor, (0, 0, 0, extra_ranks))
    return left_factor.contiguous(), right_factor.contiguous()
