"""What one process holds for a model in training, measured and by formula.

Four items: parameters, gradients, optimizer state, and the activations that the forward pass saves for the backward
pass. Memory is counted in storages: a storage that several tensors share (a tied weight, a view) counts once, and
whole. What is not counted: temporaries inside an operation, communication buffers, and what the allocator keeps in
reserve.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autograder.lab.gpt import GPTConfig


@dataclass(frozen=True)
class Memory:
    """Bytes that a process holds for one model, by item."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def items(self) -> dict[str, int]:
        """Name of each item, and its bytes."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "saved activations": self.activations,
        }

    def __str__(self) -> str:
        rows = self.items() | {"total": self.total}
        return "\n".join(f"{name:18}{nbytes:14,} bytes" for name, nbytes in rows.items())


# Measured


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    forward: Callable[[], object] | None = None,
) -> Memory:
    """What is held for a model now and, if `forward` is given, what that call saves for the backward pass.

    Gradients exist from the first backward on, an optimizer's state from its first step on.
    """
    parameters = list(model.parameters())
    return Memory(
        storage_bytes(parameters),
        storage_bytes(p.grad for p in parameters if p.grad is not None),
        0 if optimizer is None else storage_bytes(_tensors(dict(optimizer.state))),
        0 if forward is None else saved_bytes(forward, model.parameters()),
    )


def optimizer_state_bytes() -> int:
    """Bytes of the state of all torch optimizers that there are in this process, each storage once."""
    return storage_bytes(t for optimizer in _optimizers() for t in _tensors(dict(optimizer.state)))


def _optimizers() -> list[torch.optim.Optimizer]:
    """All that the garbage collector knows."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    return sum({key: tensor.untyped_storage().nbytes() for key, tensor in _by_storage(tensors)}.values())


def saved_bytes(forward: Callable[[], object], not_counted: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves during `forward()` for the backward pass, each storage once.

    Args:
        forward: computes something that needs gradients, such as a loss.
        not_counted: tensors whose storages are left out, usually the model's parameters.
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        key = _key(tensor)
        storages.setdefault(key, tensor.untyped_storage())  # held, so that its address is not used again
        return tensor

    excluded = {key for key, _ in _by_storage(not_counted)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in excluded)


def _key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _by_storage(tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    return ((_key(tensor), tensor) for tensor in tensors)


def _tensors(tree: object) -> Iterator[Tensor]:
    """All tensors in nested dicts and lists; not the keys of the dicts, which in an optimizer are its parameters."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)


# By formula


def state_bytes_per_parameter(
    mixed: bool = False, gradients: bool = True, fp32_gradients: bool = False
) -> dict[str, int]:
    """Bytes of state for each parameter under Adam or AdamW, by part; their sum is what a parameter costs.

    All in fp32: 4 + 4 + 8 = 16, and 12 without the gradients. Mixed precision: 2 + 2 + 4 + 8 = 16, and 18 where the
    gradients are kept in fp32 to accumulate in. Adam's step counter, 4 bytes for each tensor, is left out.

    Args:
        mixed: bf16 weights for computing, with an fp32 copy that the optimizer works on.
        gradients: whether they are counted.
        fp32_gradients: whether mixed precision keeps its gradients in fp32.
    """
    parts = {"weights": 2 if mixed else 4}
    if gradients:
        parts["gradients"] = 2 if mixed and not fp32_gradients else 4
    if mixed:
        parts["fp32 copy"] = 4
    return parts | {"first moment": 4, "second moment": 4}


def block_activation_bytes(config: GPTConfig, batch_size: int, tokens: int, element_size: int = 4) -> int:
    """Bytes that one block of `lab.gpt` saves for backward: B·T·((8 + 2·e)·D + H + 4) elements.

    B·T·D each for: the block's input (saved by the first norm), its normalised copy (one for q, k and v together), q,
    k, v, the attention's output (one for the attention and for the projection after it), the stream after attention
    (by the second norm), its normalised copy: 8. B·T·e·D each for the input of GELU and its output: 2·e. Per token
    also H numbers of the softmax, and mean and deviation of two norms.

    It holds for one dtype throughout and the fused attention, which saves no T x T scores.
    """
    per_token = (8 + 2 * config.expansion) * config.width + config.heads + 4
    return batch_size * tokens * per_token * element_size


def gpt_activation_bytes(config: GPTConfig, batch_size: int, tokens: int, element_size: int = 4) -> int:
    """Bytes that `GPT.loss` saves for backward: those of its blocks, and at the ends B·T·(2·D + V + 2) elements.

    The ends are input and output of the last norm with its two numbers per token, and the log-probabilities. Token
    ids and targets (int64) are saved, too: 16 bytes for each token; and one number by the loss.
    """
    ends = batch_size * tokens * (2 * config.width + config.vocab_size + 2) * element_size
    ids = 16 * batch_size * tokens
    return config.layers * block_activation_bytes(config, batch_size, tokens, element_size) + ends + ids + element_size
