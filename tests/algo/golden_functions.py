"""How the library answers each function of the golden cases: one runner a function, and the table of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.advantages import Advantages, estimate_advantages
from rlscale.algo.correction import importance_weights, offpolicy_metrics, rejection_mask
from rlscale.algo.kl import AdaptiveKL, FixedKL, kl, kl_loss
from rlscale.algo.pass_at_k import maj_at_k, pass_at_k
from rlscale.algo.policy_loss import policy_loss
from rlscale.algo.preference import bradley_terry, dpo, pair_weights, supervised_targets, token_cross_entropy
from rlscale.algo.reward_shaping import kl_in_reward, overlong_penalty, place_rewards
from rlscale.algo.segments import sequence_counts, whiten
from rlscale.algo.value_loss import value_loss
from rlscale.batch.balance import balanced_partition
from rlscale.batch.microbatch import pack_by_budget
from rlscale.batch.weights import MODES, loss_weights
from rlscale.testing.entropy import logprob_entropy_from_logits


def finish_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Means of summed metrics: each divided by ``tokens``; ``ratio_std`` from the sums of ratio and its square."""
    tokens = max(float(sums.get("tokens", 0.0)), 1.0)
    out = {k: float(v) / tokens for k, v in sums.items() if k not in ("tokens", "ratio_sq")}
    if "ratio_sq" in sums:
        out["ratio_std"] = math.sqrt(max(float(sums["ratio_sq"]) / tokens - out["ratio"] ** 2, 0.0))
    return out


@dataclass
class Answer:
    """``values`` are compared with the expected ones of the same name; ``checks`` must all be true; ``ignore``: not
    outputs.
    """

    values: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    ignore: set[str] = field(default_factory=set)


class Case:
    """A case with its inputs as flat tensors: ``[B, L]`` lists (ragged or not) become ``[T]`` with ``cu_seqlens``."""

    def __init__(self, raw: dict[str, Any], dtype: torch.dtype) -> None:
        self.params, self.inputs, self.expected, self.dtype = raw["params"], raw["inputs"], raw["expected"], dtype
        first = next((v for v in self.inputs.values() if isinstance(v, list) and v and isinstance(v[0], list)), [])
        self.widths = [len(r) for r in first]
        self.cu = torch.tensor([0, *self.widths]).cumsum(0)
        self.width = max(self.widths, default=0)

    def flat(self, name: str) -> Tensor:
        return torch.tensor([number(x) for row in self.inputs[name] for x in row], dtype=self.dtype)

    def rows(self, name: str) -> Tensor:
        return torch.tensor([number(x) for x in self.inputs[name]], dtype=self.dtype)

    def optional(self, name: str) -> Tensor | None:
        return self.flat(name) if self.inputs.get(name) is not None else None

    def nested(self, x: Tensor) -> list[list[float]]:
        return [r.tolist() for r in x.detach().split(self.widths)]

    @property
    def mask(self) -> Tensor:
        return self.flat("response_mask" if "response_mask" in self.inputs else "mask")

    def row_mask(self, rows: list[int]) -> Tensor:
        """``[T]`` 1 at the tokens of the given rows."""
        chosen = torch.zeros(len(self.widths), dtype=self.dtype)
        chosen[rows] = 1
        return torch.repeat_interleave(chosen, self.cu.diff())

    def weights(self, mask: Tensor, mode: str | None = None, counts: bool = True) -> Tensor:
        """``counts``: the case is a part of a mini-batch, whose counts its parameters give."""
        p, mode = self.params, mode or self.params.get("loss_agg_mode", "token-mean")
        weights = loss_weights(mask.double(), self.cu, mode, scale_factor=p.get("loss_scale_factor") or self.width)
        per_row = torch.stack([(part > 0).sum() for part in mask.split(self.widths)])
        here, whole = int((per_row > 0).sum()), p.get("global_batch_size")
        if mode == "token-mean":
            here, whole = int(per_row.sum()), p.get("batch_num_tokens")
        if counts and whole is not None and mode != "token-sum":
            weights *= here / whole
        return weights.to(torch.promote_types(mask.dtype, torch.float32))


def number(x: Any) -> float:
    return math.nan if x is None else float(x)


def _advantages(c: Case, name: str, **kwargs: Any) -> Advantages:
    mask = c.mask
    rewards = c.flat("token_level_rewards") if "token_level_rewards" in c.inputs else None
    if rewards is None and "scores" in c.inputs:
        rewards = place_rewards(c.rows("scores"), mask, c.cu)
    group = torch.tensor(c.inputs["group"]) if "group" in c.inputs else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimate_advantages(
            name,
            token_rewards=torch.zeros_like(mask) if rewards is None else rewards,
            mask=mask,
            cu_seqlens=c.cu,
            group=group,
            **kwargs,
        )


def run_outcome(c: Case, name: str) -> Answer:
    kwargs = {k: c.params[k] for k in ("norm_by_std", "gamma", "eps") if k in c.params}
    a = _advantages(c, name, **kwargs)
    return Answer(
        {
            "advantages": c.nested(a.advantages),
            "returns": c.nested(a.returns),
            "invalid_rewards": a.metrics["invalid_rewards"],
        }
    )


def run_gae(c: Case, name: str) -> Answer:
    p = {"values": c.flat("values"), "gamma": c.params["gamma"], "lam": c.params["lam"]}
    raw = _advantages(c, name, **p, whiten_advantages=False)
    return Answer(
        {
            "advantages": c.nested(_advantages(c, name, **p).advantages),
            "advantages_raw": c.nested(raw.advantages),
            "returns": c.nested(raw.returns),
        }
    )


def run_remax(c: Case, name: str) -> Answer:
    a = _advantages(c, name, baselines=c.rows("reward_baselines"))
    return Answer({"advantages": c.nested(a.advantages), "returns": c.nested(a.returns)})


def run_gdpo(c: Case, name: str) -> Answer:
    components = torch.tensor(c.inputs["component_scores"], dtype=c.dtype)
    c.widths = [len(r) for r in c.inputs["response_mask"]]
    c.cu = torch.tensor([0, *c.widths]).cumsum(0)
    a = _advantages(c, name, components=components, weights=c.params["weights"])
    return Answer({"advantages": c.nested(a.advantages)})


def run_token_baseline(c: Case, name: str) -> Answer:
    a = _advantages(
        c,
        name,
        old_logprobs=c.flat("old_log_probs"),
        sum_pi_squared=c.flat("sum_pi_squared"),
        is_weights=c.optional("rollout_is_weights"),
        epsilon=c.params["epsilon"],
        handle_zero_tail=c.params["handle_zero_tail"],
    )
    return Answer({"advantages": c.nested(a.advantages), "returns": c.nested(a.returns)})


def run_loo_std(c: Case, name: str) -> Answer:
    rewards = torch.tensor(c.inputs["rewards"], dtype=c.dtype)
    n = rewards.numel()
    a = estimate_advantages(
        "rloo",
        token_rewards=rewards,
        mask=torch.ones_like(rewards),
        cu_seqlens=torch.arange(n + 1),
        group=torch.zeros(n, dtype=torch.int64),
        norm_by_loo_std=True,
    )
    return Answer({"advantages": a.advantages.tolist()})


def run_rejection(c: Case, name: str) -> Answer:
    keep = c.flat("rejection_mask")
    returns = _advantages(c, "reinforce_plus_plus", gamma=c.params["gamma"]).returns * keep
    grpo = _advantages(c, "grpo", norm_by_std=c.params["norm_by_std"]).advantages * keep
    return Answer({"reinforce_plus_plus_returns": c.nested(returns), "grpo_advantages": c.nested(grpo)})


def run_whiten(c: Case, name: str) -> Answer:
    return Answer({"whitened": c.nested(whiten(c.flat("values"), c.mask > 0)), "error": False})


def run_policy(c: Case, name: str) -> Answer:
    modes = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
    weights = c.weights(c.mask, modes.get(name))
    own = {
        k: v
        for k, v in c.params.items()
        if k not in ("loss_agg_mode", "loss_scale_factor", "batch_num_tokens", "global_batch_size", "null_means")
    }
    logp = c.flat("log_prob").requires_grad_()

    def loss(mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            name,
            logprobs=logp,
            old_logprobs=c.flat("old_log_prob"),
            advantages=c.flat("advantages"),
            mask=mask,
            weights=weights,
            cu_seqlens=c.cu,
            is_weights=c.optional("rollout_is_weights"),
            **own,
        )

    value, sums = loss(c.mask)
    (grad,) = torch.autograd.grad(value, logp)
    metrics = finish_metrics(sums)
    values = {
        "loss": value,
        "grad_log_prob": c.nested(grad),
        "clipfrac": metrics.get("pg_clipfrac"),
        "clipfrac_lower": metrics.get("pg_clipfrac_lower"),
        "ppo_kl": metrics["ppo_kl"],
        "mean_abs_log_ratio": metrics.get("mean_abs_log_ratio"),
        "seq_ratio": metrics.get("seq_ratio"),
    }
    if "micro_batches" in c.inputs:
        values["micro_batch_values"] = [loss(c.mask * c.row_mask(rows))[0] for rows in c.inputs["micro_batches"]]
    return Answer(values)


def run_gpg(c: Case, name: str) -> Answer:
    return run_policy(c, name) if "log_prob" in c.inputs else run_outcome(c, name)


def run_agg(c: Case, name: str) -> Answer:
    if "token_counts" in c.inputs:
        counts = torch.tensor(c.inputs["token_counts"])
        loss = torch.repeat_interleave(c.rows("means"), counts)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return Answer({"value": (loss * loss_weights(torch.ones_like(loss), cu, c.params["loss_agg_mode"])).sum()})
    loss, mask = c.flat("loss").requires_grad_(), c.flat("mask")

    def total(mask: Tensor, mode: str | None = None, counts: bool = True, among: Tensor | None = None) -> Tensor:
        weights = c.weights(mask, mode, counts)
        chosen = (mask > 0) if among is None else (mask > 0) & (among > 0)
        return torch.where(chosen, loss, 0.0).mul(torch.where(chosen, weights, 0.0)).sum()

    if "loss_agg_modes" in c.params or "loss_agg_mode" not in c.params:
        values: dict[str, Any] = {m: total(mask, m) for m in MODES}
        (grad,) = torch.autograd.grad(sum(values.values()), loss)
        checks = {"grad_at_masked": bool((grad[mask == 0] == c.expected.get("grad_at_masked", 0.0)).all())}
        if "value" in c.expected:
            checks |= {m: v.item() == c.expected["value"] for m, v in values.items()}
            values = {}
        return Answer(values | {"grad": c.nested(grad)}, checks, {"grad_at_masked", "value"})
    value = total(mask)
    (grad,) = torch.autograd.grad(value, loss)
    values = {"value": value, "grad": c.nested(grad), "value_with_local_counts": total(mask, counts=False)}
    for key, target, factor in (("micro_batches", "micro_batch_values", 1), ("dp2_ranks", "dp2_rank_values", 2)):
        if key in c.inputs:
            values[target] = [factor * total(mask, among=c.row_mask(rows)) for rows in c.inputs[key]]
    return Answer(values)


def run_value_loss(c: Case, name: str) -> Answer:
    pred, weights = c.flat("value_pred").requires_grad_(), c.weights(c.mask)

    def loss(mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(pred, c.flat("old_values"), c.flat("returns"), mask, weights, c.params["clip"])

    value, sums = loss(c.mask)
    (grad,) = torch.autograd.grad(value, pred)
    values = {"loss": value, "grad_value_pred": c.nested(grad), "clipfrac": finish_metrics(sums)["vf_clipfrac"]}
    if "micro_batches" in c.inputs:
        values["micro_batch_values"] = [loss(c.mask * c.row_mask(rows))[0] for rows in c.inputs["micro_batches"]]
    return Answer(values)


def run_kl_penalty(c: Case, name: str) -> Answer:
    logp, ref = c.flat("log_prob").requires_grad_(), c.flat("ref_log_prob")
    if "response_mask" in c.inputs:
        loss, _ = kl_loss(c.params["kind"], logp, ref, c.mask, c.weights(c.mask))
        return Answer({"loss": loss, "grad_log_prob": c.nested(torch.autograd.grad(loss, logp)[0])})
    value = kl(c.params["kind"], logp, ref)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    return Answer(
        {
            "value": c.nested(value),
            "grad_log_prob": c.nested(grad),
            "value_finite": bool(value.isfinite().all()),
            "grad_finite": bool(grad.isfinite().all()),
            "grad_nonzero": bool((grad != 0).all()),
            "grad_sign": c.nested(grad.sign()),
        }
    )


def run_kl_in_reward(c: Case, name: str) -> Answer:
    rewards, mean = kl_in_reward(
        c.flat("token_level_scores"),
        c.flat("log_prob"),
        c.flat("ref_log_prob"),
        c.mask,
        c.cu,
        kind=c.params["kind"],
        beta=c.params["beta"],
    )
    return Answer({"token_level_rewards": c.nested(rewards), "mean_kl": mean})


def run_controller(c: Case, name: str) -> Answer:
    p = c.params
    controller = FixedKL(p["init_coef"]) if name == "fixed" else AdaptiveKL(p["init_coef"], p["target"], p["horizon"])
    return Answer(
        {
            "coef_after_each_update": [
                controller.update(k, n) for k, n in zip(c.inputs["current_kl"], c.inputs["n_steps"], strict=True)
            ]
        }
    )


def _logits(c: Case) -> Tensor:
    return torch.tensor(
        [[number(x) for x in token] for row in c.inputs["logits"] for token in row], dtype=c.dtype
    ).requires_grad_()


def run_logprob(c: Case, name: str) -> Answer:
    logits, labels = _logits(c), c.flat("labels").long()
    shape = [len(r) for r in c.inputs["labels"]]
    logp, entropy = logprob_entropy_from_logits(logits, labels, temperature=c.params["temperature"], chunk=3)
    values: dict[str, Any] = {
        "log_prob": [x.tolist() for x in logp.split(shape)],
        "entropy": [x.tolist() for x in entropy.split(shape)],
    }
    for key, x in (("grad_sum_log_prob", logp), ("grad_sum_entropy", entropy)):
        values[key] = [g.tolist() for g in torch.autograd.grad(x.sum(), logits, retain_graph=True)[0].split(shape)]
    if "rollout_log_prob" in c.inputs:
        values["ratio"] = [x.tolist() for x in (logp - c.flat("rollout_log_prob")).exp().split(shape)]
    return Answer(values)


def run_sft(c: Case, name: str) -> Answer:
    logits = _logits(c)
    widths = [len(r) for r in c.inputs["input_ids"]]
    cu = torch.tensor([0, *widths]).cumsum(0)
    ids, mask = c.flat("input_ids").long(), c.flat("loss_mask")
    source, target = supervised_targets(ids, mask, cu)
    logp, _ = logprob_entropy_from_logits(logits[source], ids[target])
    ones = torch.ones_like(logp)
    row = torch.repeat_interleave(torch.arange(len(widths)), cu.diff())[target]
    loss, _ = token_cross_entropy(logp, ones, ones / max(target.numel(), 1))
    (grad,) = torch.autograd.grad(loss, logits)
    parts = [float(-(logp[row == i]).sum() / max(target.numel(), 1)) for i in range(len(widths))]
    trained = [(target[row == i] - cu[i]).tolist() for i in range(len(widths))]
    return Answer(
        {
            "loss": loss,
            "num_tokens": target.numel(),
            "grad_logits": [g.tolist() for g in grad.split(widths)],
            "micro_batch_values": parts,
            "trained_positions": trained,
        }
    )


def run_importance_weights(c: Case, name: str) -> Answer:
    p = c.params
    w, metrics = importance_weights(
        c.flat("log_prob") - c.flat("rollout_log_prob"),
        c.mask,
        c.cu,
        level=p["level"],
        kind=p["kind"],
        upper=p["upper"],
        lower=p["lower"],
        batch_normalize=p["batch_normalize"],
    )
    return Answer({"weights": c.nested(w), **metrics})


def run_rejection_mask(c: Case, name: str) -> Answer:
    q = c.flat("log_ratio") if "log_ratio" in c.inputs else c.flat("log_prob") - c.flat("rollout_log_prob")
    mask, metrics = rejection_mask(
        q, c.mask, c.cu, options=c.params["options"], upper=c.params["upper"], lower=c.params.get("lower")
    )
    return Answer({"mask": c.nested(mask), **metrics})


def run_offpolicy(c: Case, name: str) -> Answer:
    return Answer(dict(offpolicy_metrics(c.flat("log_prob"), c.flat("rollout_log_prob"), c.mask, c.cu)))


def run_partition(c: Case, name: str) -> Answer:
    lengths = c.inputs["lengths"]
    parts = balanced_partition(lengths, c.params["k"], equal_size=c.params.get("equal_size", False))
    heaviest = max(sum(lengths[i] for i in p) for p in parts)
    checks = {
        f"max {heaviest} <= {c.expected['verl_max']}": heaviest <= c.expected["verl_max"],
        "every item once": sorted(i for p in parts for i in p) == list(range(len(lengths))),
        "sizes": not c.params.get("equal_size") or len({len(p) for p in parts}) == 1,
    }
    return Answer({}, checks, set(c.expected))


def run_token_budget(c: Case, name: str) -> Answer:
    lengths, budget = c.inputs["lengths"], c.params["budget"]
    bins = pack_by_budget(lengths, budget)
    checks = {
        "budget kept": max(sum(lengths[i] for i in b) for b in bins) <= budget,
        f"count {len(bins)} <= {c.expected['first_fit_decreasing_count']}": len(bins)
        <= c.expected["first_fit_decreasing_count"],
        "every item once": sorted(i for b in bins for i in b) == list(range(len(lengths))),
    }
    return Answer({}, checks, set(c.expected))


def run_micro_batches(c: Case, name: str) -> Answer:
    lengths = c.inputs["lengths"]
    try:
        bins = pack_by_budget(lengths, c.params["budget"])
    except ValueError as e:
        return Answer(
            {"error": True},
            {"length and budget named": str(max(lengths)) in str(e) and str(c.params["budget"]) in str(e)},
        )
    return Answer({"count": len(bins), "max_tokens": max(sum(lengths[i] for i in b) for b in bins), "error": False})


def run_overlong(c: Case, name: str) -> Answer:
    p = c.params
    penalty = overlong_penalty(
        torch.tensor(c.inputs["lengths"]),
        max_response_length=p["max_response_length"],
        buffer=p["buffer"],
        penalty_factor=p["penalty_factor"],
    )
    return Answer({"penalty": penalty.tolist(), "reward": (penalty + c.inputs["score"]).tolist()})


def run_placement(c: Case, name: str) -> Answer:
    return Answer({"token_level_rewards": c.nested(place_rewards(c.rows("scores"), c.mask, c.cu))})


def run_response_length(c: Case, name: str) -> Answer:
    return Answer({"model_tokens": int(sequence_counts(c.mask > 0, c.cu).sum())})


def run_pass_at_k(c: Case, name: str) -> Answer:
    return Answer({"value": pass_at_k(c.params["n"], c.params["correct"], c.params["k"])})


def run_pass_at_k_dataset(c: Case, name: str) -> Answer:
    pairs = list(zip(c.inputs["n"], c.inputs["correct"], strict=True))
    return Answer({"value": sum(pass_at_k(n, r, c.params["k"]) for n, r in pairs) / len(pairs)})


def run_maj_at_k(c: Case, name: str) -> Answer:
    return Answer({"value": maj_at_k(c.inputs["answers"], c.params["correct_answer"], c.params["k"])})


def run_bradley_terry(c: Case, name: str) -> Answer:
    chosen, rejected = c.rows("chosen_reward").requires_grad_(), c.rows("rejected_reward").requires_grad_()
    margin = c.rows("margin") if "margin" in c.inputs else None
    loss, sums = bradley_terry(chosen, rejected, pair_weights(chosen.numel(), dtype=c.dtype), margin)
    g_chosen, g_rejected = torch.autograd.grad(loss, (chosen, rejected))
    return Answer(
        {
            "loss": loss,
            "grad_chosen": g_chosen.tolist(),
            "grad_rejected": g_rejected.tolist(),
            "accuracy": float(sums["accuracy"]) / float(sums["pairs"]),
        }
    )


def run_dpo(c: Case, name: str) -> Answer:
    chosen, rejected = c.rows("policy_chosen_logp").requires_grad_(), c.rows("policy_rejected_logp").requires_grad_()
    kind = name.removeprefix("dpo_").removesuffix("_length_normalized")
    lengths = {k: c.rows(k) for k in ("chosen_length", "rejected_length") if k in c.inputs}
    loss, m = dpo(
        kind,
        policy_chosen=chosen,
        policy_rejected=rejected,
        ref_chosen=c.rows("ref_chosen_logp"),
        ref_rejected=c.rows("ref_rejected_logp"),
        weights=pair_weights(chosen.numel(), dtype=c.dtype),
        beta=c.params["beta"],
        label_smoothing=c.params["label_smoothing"],
        **lengths,
    )
    g_chosen, g_rejected = torch.autograd.grad(loss, (chosen, rejected))
    return Answer(
        {
            "loss": loss,
            "grad_policy_chosen": g_chosen.tolist(),
            "grad_policy_rejected": g_rejected.tolist(),
            "chosen_reward": m["chosen_reward"].tolist(),
            "rejected_reward": m["rejected_reward"].tolist(),
        }
    )


Runner = Callable[[Case, str], Answer]
TABLE: dict[str, Runner] = {
    "gae": run_gae,
    "remax": run_remax,
    "gdpo": run_gdpo,
    "loo_std": run_loo_std,
    "whiten": run_whiten,
    "rejection": run_rejection,
    "optimal_token_baseline": run_token_baseline,
    "tir_optimal_token_baseline": run_token_baseline,
    "gpg": run_gpg,
    "agg": run_agg,
    "value_loss": run_value_loss,
    "kl_penalty": run_kl_penalty,
    "kl_in_reward": run_kl_in_reward,
    "adaptive": run_controller,
    "fixed": run_controller,
    "logprob_entropy": run_logprob,
    "sft": run_sft,
    "sft_cross_entropy": run_sft,
    "importance_weights": run_importance_weights,
    "rejection_mask": run_rejection_mask,
    "offpolicy_metrics": run_offpolicy,
    "balanced_partition": run_partition,
    "token_budget_micro_batches": run_token_budget,
    "micro_batches": run_micro_batches,
    "overlong_penalty": run_overlong,
    "reward_placement": run_placement,
    "response_length": run_response_length,
    "pass_at_k": run_pass_at_k,
    "pass_at_k_dataset": run_pass_at_k_dataset,
    "maj_at_k": run_maj_at_k,
    "bradley_terry": run_bradley_terry,
    **dict.fromkeys(
        ("grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), run_outcome
    ),
    **dict.fromkeys(
        (
            "vanilla",
            "cispo",
            "dppo_tv",
            "dppo_kl",
            "kl_cov",
            "clip_cov",
            "dro",
            "reinforce",
            "gspo",
            "sapo",
            "geo_mean",
        ),
        run_policy,
    ),
    **dict.fromkeys(MODES, run_agg),
    **{f"dpo_{k}": run_dpo for k in ("sigmoid", "cdpo", "ipo", "robust", "hinge", "ipo_length_normalized")},
}
