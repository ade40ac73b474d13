"""The given model and data."""

import numpy as np
import pytest
import torch

from autograder.lab import data, gpt


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_by_formula(tied):
    config = gpt.GPTConfig(vocab_size=50, context_length=7, width=12, heads=3, layers=3, tied=tied)
    model = gpt.GPT(config)
    assert sum(p.numel() for p in model.parameters()) == gpt.count_parameters(config)


def test_flops_by_counting():
    from torch.utils.flop_counter import FlopCounterMode

    model = gpt.tiny()
    tokens = torch.randint(0, 64, (2, 32))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.loss(tokens, tokens).backward()
    assert counter.get_total_flops() == pytest.approx(gpt.flops_per_token(model.config) * tokens.numel(), rel=0.02)


def test_causal_in_float64():
    model = gpt.tiny()
    tokens = torch.randint(0, 64, (1, 10))
    before = model(tokens)
    tokens[0, 6] = (tokens[0, 6] + 1) % 64
    after = model(tokens)
    assert before.dtype == torch.float64
    assert before.shape == (1, 10, 64)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])


def test_width_must_fit_heads():
    with pytest.raises(ValueError, match="multiple of heads"):
        gpt.GPTConfig(width=10, heads=4)


def test_corpus_is_a_memory_map_written_once(tmp_path):
    tokens = data.corpus(tmp_path / "corpus.npy", size=10_000)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    assert len(tokens) == 10_000
    assert "import" in data.decode(tokens)
    written = (tmp_path / "corpus.npy").stat().st_mtime_ns
    data.corpus(tmp_path / "corpus.npy", size=10_000)
    assert (tmp_path / "corpus.npy").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [tmp_path / "corpus.npy"]
