"""Models of module 04's checks, that say what they see: which values they compute with, and when."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = -1  # as the number of a unit


class Mark(torch.autograd.Function):
    """The identity. Backward of a layer begins here."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.see("backward")
        return gradient, None


class Seen(nn.Module):
    """A module whose computation is watched: `watch(kind, index, tensors by name)`."""

    index = ROOT
    watch: Callable | None = None
    names: Sequence[str] = ()

    def be_watched(self, watch: Callable | None) -> None:
        """Say from now on what it sees; its tensors are looked up by name, as a wrapper may take them out."""
        self.watch = watch
        self.names = [name for name, _ in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]]

    def see(self, kind: str, **tensors: Tensor) -> None:
        if self.watch is not None:
            self.watch(kind, self.index, {name: getattr(self, name) for name in self.names} | tensors)


class Layer(Seen):
    """tanh(down(up(x))) + offset; `spare` takes part where it is asked for. With `aside`, up(x) is an output, too.

    x comes as it is, or in a list in a dict: {"boxed": [x]}.
    """

    def __init__(self, draw: Callable, index: int, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.index, self.dropout = index, dropout
        self.up = nn.Parameter(draw(hidden, width))
        self.spare = nn.Parameter(draw(hidden))
        self.down = nn.Parameter(draw(width, hidden))
        self.bias = nn.Parameter(draw(width))
        self.register_buffer("offset", draw(width))

    def forward(self, x: Tensor | dict, spare: bool = True, aside: bool = False) -> Tensor | tuple[Tensor, dict]:
        x = x["boxed"][0] if isinstance(x, dict) else x
        self.see("forward", x=x)
        h = F.linear(x, self.up)
        if spare:
            h = h * self.spare
        h = F.dropout(h, self.dropout)
        y = Mark.apply(torch.tanh(F.linear(h, self.down, self.bias)) + self.offset.to(x.dtype), self)
        return (y, {"aside": h}) if aside else y


class Chain(Seen):
    """Layers one after the other, between a scale and a head that are in no unit."""

    def __init__(self, draw: Callable, width: int, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.by_keyword = False  # whether every other layer gets its input so, in a dtype that is to be cast
        self.scale = nn.Parameter(draw(width))
        self.layers = nn.ModuleList(Layer(draw, i, width, h, dropout) for i, h in enumerate(hidden))
        self.head = nn.Parameter(draw(3, width))

    def forward(
        self, x: Tensor, *, order: list[int] | None = None, bare: Sequence[int] = (), aside: bool = False,
        boxed: bool = False, more: dict | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Args: layers in the order of their use; those whose spare parameter is not used; whether each layer's second
        output is added to the model's; whether each gets its input in a box; lists of tensors that are only looked
        at."""
        self.see(
            "forward", x=x, **{f"{k} {i}": t for k, tensors in (more or {}).items() for i, t in enumerate(tensors)}
        )
        x, total = x * self.scale, 0.0
        for i in range(len(self.layers)) if order is None else order:
            spare = i not in bare
            if self.by_keyword and i % 2 == 1:
                x = self.layers[i](x=x.float() if x.dtype == torch.bfloat16 else x, spare=spare)
            elif boxed:
                x = self.layers[i]({"boxed": [x]}, spare)
            elif aside:
                x, more = self.layers[i](x, spare, aside=True)
                total = total + more["aside"].sum(dim=1, keepdim=True)
            else:
                x = self.layers[i](x, spare=spare)
        return {"y": F.linear(x, self.head) + total}


def drawing(rng: torch.Generator, dtype: torch.dtype = torch.float64) -> Callable:
    """Random numbers of a shape, such that no layer's output is saturated."""

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=rng, dtype=torch.float64) / max(*shape[-1:], 1, 1) ** 0.5).to(dtype)

    return draw


def watched(model: Chain) -> list[Seen]:
    """All modules that say what they see."""
    return [model, *model.layers]


def chain(rng: torch.Generator, dtype: torch.dtype = torch.float64, hidden: Sequence[int] = (7, 9, 12)) -> Chain:
    """Three units of 82, 104 and 137 elements, and a root of 20: none is divided by 3 and 4 without a rest."""
    return Chain(drawing(rng, dtype), 5, hidden)


def two_dtypes(rng: torch.Generator) -> Chain:
    """A chain with a float32 parameter in each layer, beside those of float64."""
    model = chain(rng)
    for layer in model.layers:
        layer.spare = nn.Parameter(layer.spare.detach().float())
    return model


def of_all_kinds(rng: torch.Generator) -> Chain:
    """A chain with a transposed parameter, whole numbers in a buffer, and a buffer that is not saved."""
    model = chain(rng)
    draw = drawing(rng)
    layer = model.layers[1]
    layer.down = nn.Parameter(draw(layer.down.shape[1], layer.down.shape[0]).t())
    layer.register_buffer("count", torch.randint(0, 1000, (3,), generator=rng))
    layer.register_buffer("scratch", draw(2), persistent=False)
    return model


def tie_across(model: Chain) -> Chain:
    """The first and the third layer share a bias; the second knows a weight by two names."""
    model.layers[2].bias = model.layers[0].bias
    model.layers[1].register_parameter("again", model.layers[1].up)
    return model


def unit_sizes(model: Chain) -> dict[int, int]:
    """Number of elements of each unit, and of the root's; of a model without ties."""
    sizes = {layer.index: sum(p.numel() for p in layer.parameters()) for layer in model.layers}
    return sizes | {ROOT: sum(p.numel() for p in model.parameters()) - sum(sizes.values())}


def unit_parts(model: Chain) -> list[dict[torch.dtype, int]]:
    """Number of elements of each unit but the root's, by dtype."""
    parts: list[dict[torch.dtype, int]] = []
    for layer in model.layers:
        parts.append({})
        for p in layer.parameters():
            parts[-1][p.dtype] = parts[-1].get(p.dtype, 0) + p.numel()
    return parts
