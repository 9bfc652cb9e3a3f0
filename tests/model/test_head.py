"""The chunked head against full logits in float64: values and gradients, any chunk, padding, temperature, entropy,
two ranks.
"""

from __future__ import annotations

import pytest
import torch

from rlscale.model.head import vocab_parallel_logprob_entropy


def full(hidden, weight, targets, temperature, real):
    logits = (hidden @ weight[:real].t()) / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def inputs(t=13, h=7, v=31, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(t, h, generator=g, dtype=torch.float64)
    weight = torch.randn(v, h, generator=g, dtype=torch.float64)
    targets = torch.randint(0, v - 4, (t,), generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_equals_full_logits(chunk, temperature, entropy_grad):
    hidden, weight, targets = inputs()
    logp, ent = vocab_parallel_logprob_entropy(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk=chunk,
        vocab_real=27,
        with_entropy=True,
        entropy_grad=entropy_grad,
    )
    want_logp, want_ent = full(hidden, weight, targets, temperature, 27)
    torch.testing.assert_close(logp, want_logp, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ent, want_ent, rtol=1e-12, atol=1e-13)
    a, b = torch.randn(13, dtype=torch.float64), torch.randn(13, dtype=torch.float64) * entropy_grad
    got = torch.autograd.grad((logp * a).sum() + ((ent * b).sum() if entropy_grad else 0), (hidden, weight))
    want = torch.autograd.grad((want_logp * a).sum() + (want_ent * b).sum(), (hidden, weight))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert bool((got[1][27:] == 0).all())


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_grad_and_empty(with_entropy):
    hidden, weight, targets = inputs()
    with torch.no_grad():
        logp, ent = vocab_parallel_logprob_entropy(hidden, weight, targets, chunk=5, with_entropy=with_entropy)
        want, want_ent = full(hidden, weight, targets, 1.0, 31)
    torch.testing.assert_close(logp, want, rtol=1e-13, atol=1e-13)
    assert (ent is None) == (not with_entropy)
    if with_entropy:
        torch.testing.assert_close(ent, want_ent, rtol=1e-12, atol=1e-13)
    logp, _ = vocab_parallel_logprob_entropy(hidden[:0], weight, targets[:0])
    logp.sum().backward()
    assert logp.shape == (0,) and bool((weight.grad == 0).all())


def test_bfloat16_gradient_of_a_confident_token_does_not_vanish():
    """p_y = 0.9995 rounds to 1 in bfloat16; the gradient g (1 - p_y) must survive."""
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.625], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logp, _ = vocab_parallel_logprob_entropy(hidden, weight, torch.tensor([0]))
    logp.sum().backward()
    p = torch.sigmoid(torch.tensor(7.625))
    torch.testing.assert_close(weight.grad[0, 0].float(), 1 - p, rtol=1e-2, atol=0)
    torch.testing.assert_close(hidden.grad[0, 0].float(), 7.625 * (1 - p), rtol=1e-2, atol=0)


@pytest.mark.parametrize("chunk", [16, 64, 200])
def test_bfloat16_close_to_float64(chunk):
    hidden, weight, targets = inputs(t=150, h=64, v=512, dtype=torch.bfloat16)
    logp, ent = vocab_parallel_logprob_entropy(hidden, weight, targets, chunk=chunk, with_entropy=True)
    exact_h, exact_w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want, want_ent = full(exact_h, exact_w, targets, 1.0, 512)
    assert (logp - want).abs().mean() < 0.03 and (ent - want_ent).abs().mean() < 0.03
    a = torch.randn(150)
    got = torch.autograd.grad((logp * a).sum(), (hidden, weight))
    expect = torch.autograd.grad((want * a).sum(), (exact_h, exact_w))
    for x, y in zip(got, expect, strict=True):
        assert (x.double() - y).norm() / y.norm() < 0.02


def test_never_more_than_a_chunk_of_logits(monkeypatch):
    """The largest tensor made in forward and backward has chunk x vocabulary entries (the weight's gradient aside)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 301:
                self.rows = max(self.rows, out.shape[0])
            return out

    hidden, weight, targets = inputs(h=3, v=301)
    with Largest() as seen:
        vocab_parallel_logprob_entropy(hidden, weight, targets, chunk=5, with_entropy=True)[0].sum().backward()
    assert seen.rows == 5
    monkeypatch.setattr("rlscale.model.head._PIECE", 3)
    with Largest() as seen, torch.no_grad():  # nothing is kept: the pieces of the forward pass are enough
        vocab_parallel_logprob_entropy(hidden, weight, targets, chunk=13)
    assert seen.rows == 3


def test_errors():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="must be"):
        vocab_parallel_logprob_entropy(hidden, weight[:, :3], targets)
    with pytest.raises(ValueError, match="dtype"):
        vocab_parallel_logprob_entropy(hidden, weight.float(), targets)
    with pytest.raises(ValueError, match="temperature"):
        vocab_parallel_logprob_entropy(hidden, weight, targets, temperature=0.0)


def head_on_ranks(entropy_grad: bool, dtype: str) -> list[float]:
    """Worst errors of log-prob, entropy and gradients of a vocabulary split over the ranks, padding on the last one."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets = inputs(v=32, dtype=getattr(torch, dtype))
    local = 32 // size
    a, b = torch.randn(2, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    b = b * entropy_grad
    want_logp, want_ent = full(hidden, weight, targets, 0.8, 29)
    want = torch.autograd.grad((want_logp * a).sum() + (want_ent * b).sum(), (hidden, weight))
    shard = weight.detach()[rank * local : (rank + 1) * local].clone().requires_grad_()
    logp, ent = vocab_parallel_logprob_entropy(
        hidden,
        shard,
        targets,
        temperature=0.8,
        chunk=5,
        tp_group=dist.group.WORLD,
        vocab_start=rank * local,
        vocab_real=29,
        with_entropy=True,
        entropy_grad=entropy_grad,
    )
    got = torch.autograd.grad((logp * a).sum() + ((ent * b).sum() if entropy_grad else 0), (hidden, shard))
    pairs = (
        (logp, want_logp),
        (ent, want_ent),
        (got[0], want[0]),
        (got[1], want[1][rank * local : (rank + 1) * local]),
    )
    return [float((x - y).abs().max()) for x, y in pairs]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_over_ranks(world, size, entropy_grad):
    for errors in world(size, head_on_ranks, entropy_grad, "float64"):
        assert max(errors) < 1e-12
