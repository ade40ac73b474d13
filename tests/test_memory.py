"""The memory instrument counts what is there, and its formulas say the same."""

import pytest
import torch
from torch import nn

from autograder.lab.gpt import GPT, Block, GPTConfig, count_parameters
from autograder.lab.memory import (
    Memory,
    block_activation_bytes,
    gpt_activation_bytes,
    measure,
    optimizer_state_bytes,
    saved_bytes,
    state_bytes_per_parameter,
    storage_bytes,
)

SMALL = GPTConfig(vocab_size=50, context_length=12, width=24, heads=3, layers=2)
LARGER = GPTConfig(vocab_size=64, context_length=40, width=64, heads=4, layers=3, expansion=2, tied=True)
SIZES = [(SMALL, 2, 12), (SMALL, 1, 7), (LARGER, 3, 40)]


@pytest.mark.parametrize(("config", "batch_size", "tokens"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_block_activations(config, batch_size, tokens, dtype):
    block = Block(config).to(dtype)
    x = torch.randn(batch_size, tokens, config.width, dtype=dtype, requires_grad=True)
    found = saved_bytes(lambda: block(x), block.parameters())
    assert found == block_activation_bytes(config, batch_size, tokens, dtype.itemsize)


@pytest.mark.parametrize(("config", "batch_size", "tokens"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpt_activations(config, batch_size, tokens, dtype):
    model = GPT(config).to(dtype)
    ids = torch.randint(config.vocab_size, (batch_size, tokens + 1))
    x, y = ids[:, :-1].clone(), ids[:, 1:].clone()  # storages of their own
    found = measure(model, forward=lambda: model.loss(x, y)).activations
    assert found == gpt_activation_bytes(config, batch_size, tokens, dtype.itemsize)


@pytest.mark.parametrize("config", [SMALL, LARGER])
def test_state(config):
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    count = count_parameters(config)  # a tied weight counts once
    assert measure(model, optimizer) == Memory(4 * count, 0, 0)
    model.loss(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)).backward()
    assert measure(model, optimizer) == Memory(4 * count, 4 * count, 0)
    optimizer.step()
    tensors = len(list(model.parameters()))
    assert measure(model, optimizer) == Memory(4 * count, 4 * count, 8 * count + 4 * tensors)
    per_parameter = sum(state_bytes_per_parameter().values())
    assert measure(model, optimizer).total == per_parameter * count + 4 * tensors


def test_bytes_per_parameter():
    assert sum(state_bytes_per_parameter().values()) == 16
    assert sum(state_bytes_per_parameter(gradients=False).values()) == 12
    assert state_bytes_per_parameter(mixed=True)["gradients"] == 2
    assert sum(state_bytes_per_parameter(mixed=True).values()) == 16
    assert sum(state_bytes_per_parameter(mixed=True, fp32_gradients=True).values()) == 18


def test_a_storage_counts_once_and_whole():
    x = torch.zeros(10)
    assert storage_bytes([x, x[:3], x.view(2, 5)]) == 40
    assert storage_bytes([x[:3], torch.zeros(2, dtype=torch.float64)]) == 40 + 16
    assert storage_bytes([]) == 0


def test_parameters_are_not_activations():
    linear, x = nn.Linear(4, 4), torch.zeros(2, 4)
    assert saved_bytes(lambda: linear(x).relu(), linear.parameters()) == 32 + 32  # x for the weight, and relu's output
    with torch.no_grad():
        assert saved_bytes(lambda: linear(x)) == 0


def test_memory_prints():
    memory = Memory(4000, 4000, 8000, 500)
    assert memory.total == 16_500
    assert "optimizer state            8,000 bytes" in str(memory)


def test_optimizer_state_bytes_are_those_of_all_optimizers():
    before = optimizer_state_bytes()
    weights = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], momentum=0.9) for w in weights]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(1000)
        optimizer.step()
    assert optimizer_state_bytes() - before == 8000
    optimizers.clear()
    assert optimizer_state_bytes() - before <= 4000  # the loop's variable holds the last one
