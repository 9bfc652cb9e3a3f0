"""The engine equals one process with transformers and AdamW, in every layout it supports.

The comparison and the list of layouts are those of `rlscale.testing.parity`; here run the ones that differ most, and
with a mend taken out the comparison must fail.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rlscale.testing.parity import cases, comparison, reference, run
from rlscale.testing.parity.cases import Case, Difference
from tests import worlds

BOUND = run.BOUNDS["float32"]
LAYOUTS = {
    "tied, prompts repeated": Case(tied=True, share_prefix=False),
    "dp2 zero2": Case(dp=2, zero=2, arch="mistral"),
    "tp2, 2 kv heads": Case(tp=2, kv=2, arch="qwen2"),
    "tp2 sp tied": Case(tp=2, sp=True, tied=True),
    "pp2 tied recompute": Case(pp=2, tied=True, recompute=True, arch="llama"),
    "ulysses2, 1 kv head": Case(ulysses=2, kv=1),
    "critic dp2 zero2": Case(role="critic", dp=2, zero=2),
    "tp4 sp": Case(tp=4, sp=True, arch="qwen2"),
    "pp4": Case(pp=4),
    "tp2 pp2 sp tied": Case(tp=2, pp=2, sp=True, tied=True, recompute=True),
    "tp2 sp dp2 zero2": Case(tp=2, sp=True, dp=2, zero=2, tied=True, arch="llama"),
    "pp2 dp2 zero2": Case(pp=2, dp=2, zero=2, arch="mistral"),
    "ulysses4, 2 kv heads": Case(ulysses=4, kv=2, zero=2, tied=True),
    "ulysses2 pp2 tied": Case(ulysses=2, pp=2, tied=True),
    "tp4, 2 kv heads": Case(tp=4, kv=2, tied=True, recompute=True),
    "experts tp2 ep2 sp dp2": Case(arch="qwen3_moe", tp=2, ep=2, sp=True, dp=2, zero=2),
    "tp2 sp dp2 zero3 tied": Case(tp=2, sp=True, dp=2, zero=3, tied=True),
    "ulysses2 dp2 zero3": Case(ulysses=2, dp=2, zero=3, recompute=True),
    "critic tp2 sp pp2": Case(role="critic", tp=2, sp=True, pp=2),
}


def on_each_rank(case: Case, fault: str = "") -> dict[str, Difference]:
    from rlscale.cluster.device import init_distributed

    prepare, patch = FAULTS[fault]() if fault else (None, nullcontext())
    with patch:
        found = comparison.compare(case, init_distributed("cpu"), prepare)
    return {d.what: d for d in found}


def differences(case: Case, fault: str = "") -> dict[str, Difference]:
    return worlds.run(case.world, on_each_rank, case, fault)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str) -> None:
    found = differences(LAYOUTS[name])
    wanted = {"loss", "gradient norm", "gradients", "parameters"}
    wanted |= {"values", "values after"} if LAYOUTS[name].role == "critic" else {"log-probs", "entropy"}
    assert wanted <= set(found)
    assert all(d.value <= BOUND for d in found.values()), found


# ---- the division of the batch

DIVISIONS = {
    "one micro-batch": Case(budget=1000),
    "a document fills the budget": Case(budget=cases.LONGEST),
    "another order": Case(budget=64, order=3),
    "every response with its prompt": Case(budget=64, share_prefix=False),
    "uneven over 2 ranks": Case(dp=2, budget=52, share_prefix=False),
    "another order over 2 ranks": Case(dp=2, order=5),
    "uneven over 4 ranks": Case(dp=4, budget=52, share_prefix=False, zero=2),
    "over 4 ranks, each row over 2 of them": Case(dp=2, ulysses=2, order=1),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_budgets_orders_and_ranks_give_the_same_parameters(name: str) -> None:
    """All are within 5e-7 of the same parameters, so any two of them are within 1e-6 of each other."""
    case = DIVISIONS[name]
    found = differences(case)
    assert found["parameters"].value < 5e-7 and all(d.value <= BOUND for d in found.values()), found


FEW = Case(dp=4, groups=1, zero=2)


def micro_batches(case: Case) -> list[int]:
    """Micro-batches of each data-parallel rank that are not empty."""
    from rlscale.batch.microbatch import plan_micro_batches

    plans = plan_micro_batches(
        reference.draw_batch(case), case.dp, max_tokens=case.budget, max_sequences=None, share_prefix=case.share_prefix
    )
    return [sum(rows.numel() > 0 for rows in plan) for plan in plans]


def test_the_batch_holds_what_goes_wrong() -> None:
    """Ranks have unequal numbers of micro-batches or none, a document is one token or the whole budget."""
    assert micro_batches(DIVISIONS["uneven over 2 ranks"]) == [2, 3]
    assert len(set(micro_batches(DIVISIONS["uneven over 4 ranks"]))) == 2
    for case in (FEW, *EIGHT.values()):
        assert case.groups > 1 or 0 in micro_batches(case)
    batch = reference.draw_batch(Case())
    lengths = batch.prompt_lengths[batch.group] + batch.response_lengths
    assert int(lengths.max()) == Case().budget and 1 in batch.response_lengths and 1 in batch.prompt_lengths
    of_row = torch.repeat_interleave(torch.arange(batch.num_samples), batch.response_lengths)
    assert 0 in torch.zeros(batch.num_samples).index_add_(0, of_row, batch.mask)  # a response that is masked altogether
    assert bool(batch.advantages.isnan().any())


def test_fewer_documents_than_ranks() -> None:
    found = differences(FEW)
    assert all(d.value <= BOUND for d in found.values()), found


def too_long(case: Case) -> list[str]:
    """Give a document that is longer than the budget to passes and steps; the errors, and whether a weight moved."""
    from rlscale.cluster.device import init_distributed

    said: list[str] = []

    def prepare(engine: Any) -> None:
        before = {key: t.clone() for key, t in engine.tensors().items()}
        batch = reference.draw_batch(case)
        engine.batching = replace(engine.batching, max_tokens=cases.LONGEST // case.ulysses - 1)
        for call in (lambda: engine.logprobs(batch), lambda: engine.update(batch, reference.objective, entropy=True)):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        assert all(torch.equal(t, before[key]) for key, t in engine.tensors().items())
        engine.batching = replace(engine.batching, max_tokens=cases.LONGEST)

    found = comparison.compare(case, init_distributed("cpu"), prepare)  # the engine goes on unharmed
    assert all(d.value <= BOUND for d in found), found
    return said


@pytest.mark.parametrize("case", [Case(pp=2), Case(ulysses=2)], ids=["pp2", "ulysses2"])
def test_document_longer_than_the_budget_is_an_error_on_every_rank(case: Case) -> None:
    for said in worlds.run(2, too_long, case):
        assert len(said) == 2
        for message in said:
            assert message.startswith("actor.ppo_max_token_len_per_gpu is ") and "sample 3 has 48 tokens" in message


# ---- faults that the comparison must see


def _re_arming() -> tuple[Any, AbstractContextManager[Any]]:
    def prepare(engine: Any) -> None:
        engine.stage.on_backward = None

    return prepare, nullcontext()


def _norm_sum() -> tuple[Any, AbstractContextManager[Any]]:
    from rlscale.model import gpt

    def prepare(engine: Any) -> None:
        for module in engine.stage.modules():
            if isinstance(module, gpt.RMSNorm):
                module.tp_group = None

    return prepare, nullcontext()


def _loss_scale() -> tuple[Any, AbstractContextManager[Any]]:
    def prepare(engine: Any) -> None:
        engine._loss_scale = lambda micro_batches: 1

    return prepare, nullcontext()


def _marks() -> tuple[Any, AbstractContextManager[Any]]:
    from rlscale.model import gpt

    return None, mock.patch.object(gpt, "_mark_sharded", lambda body: None)


def _tied_sum() -> tuple[Any, AbstractContextManager[Any]]:
    def prepare(engine: Any) -> None:
        engine.optimizer.reduce_tied = lambda: None

    return prepare, nullcontext()


def _sp_sum() -> tuple[Any, AbstractContextManager[Any]]:
    """Gradients summed over the data-parallel ranks only, as if Ulysses ranks had seen the whole row each."""

    def prepare(engine: Any) -> None:
        engine._loss_scale = lambda micro_batches: micro_batches * engine.mesh.dims.dp

    return prepare, nullcontext()


def _not_contiguous() -> tuple[Any, AbstractContextManager[Any]]:
    from rlscale.model import ulysses

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = torch.empty_like(grad)  # keeps the strides of a transposed gradient, which the exchange does not heed
        torch.distributed.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None

    return None, mock.patch.object(ulysses._AllToAll, "backward", staticmethod(backward))


FAULTS = {
    "re-arming": _re_arming,
    "norm-sum": _norm_sum,
    "loss-scale": _loss_scale,
    "marks": _marks,
    "tied-sum": _tied_sum,
    "sp-sum": _sp_sum,
    "not-contiguous": _not_contiguous,
}


@pytest.mark.parametrize(
    "fault, case, seen_in",
    [
        ("re-arming", Case(pp=2, dp=2, zero=2), ""),
        ("norm-sum", Case(tp=2, sp=True), "gradients"),
        ("loss-scale", Case(dp=2), "gradient norm"),
        ("marks", Case(tp=2), "gradient norm"),
        ("marks", Case(tp=2, zero=3), "gradient norm"),
        ("tied-sum", Case(pp=2, tied=True), "gradients"),
        ("sp-sum", Case(ulysses=2), "gradient norm"),
        ("not-contiguous", Case(ulysses=2), "gradients"),
    ],
)
def test_comparison_sees_a_mend_taken_out(fault: str, case: Case, seen_in: str) -> None:
    """Each of these gives the right log-probs before training and a wrong gradient (re-arming: none to step with)."""
    if not seen_in:
        with pytest.raises(TypeError, match="NoneType"):
            differences(case, fault)
        return
    found = differences(case, fault)
    assert found["log-probs"].value <= BOUND and found[seen_in].value > 100 * BOUND, found


# ---- eight processes, whose world leaves no room for the others

EIGHT = {
    "ulysses2 tp2 sp dp2 zero2": Case(ulysses=2, tp=2, sp=True, dp=2, zero=2, tied=True),
    "pp2 dp4, fewer documents than ranks": Case(pp=2, dp=4, groups=1, tied=True),
    "ulysses2 dp4, fewer documents than ranks": Case(ulysses=2, dp=4, groups=1, arch="qwen2"),
}


@pytest.mark.ends_worlds
@pytest.mark.parametrize("name", EIGHT)
def test_layout_of_eight_processes(name: str) -> None:
    found = differences(EIGHT[name])
    assert all(d.value <= BOUND for d in found.values()), found
