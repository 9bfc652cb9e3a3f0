"""Speed and memory of the algorithm library, side by side with plain versions of the same formulas, in one run.

    python tools/bench_algo.py [--repeat N] [--only advantages,partition,packing,head]

The plain versions are written here for the comparison: advantages on padded ``[B, L]`` tensors, Karmarkar-Karp in
Python, full logits. One thread. Each pair is run alternately and the least time of each is taken.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.algo.advantages import estimate_advantages
from rlscale.batch.balance import balanced_partition
from rlscale.batch.microbatch import pack_by_budget
from rlscale.model.head import vocab_parallel_logprob_entropy
from tools.common import alternate, memory


def machine() -> str:
    """Processor, cores, memory, versions."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")),
            name,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}; {versions}"


def least(functions: list[Callable[[], object]], repeat: int) -> list[float]:
    """Least CPU seconds of each function, run in turn; quick ones (below 50 ms) ten times as often."""

    def seconds(_: int, f: Callable[[], object]) -> float:
        start = time.process_time()
        f()
        return time.process_time() - start

    runs = {str(i): partial(seconds, f=f) for i, f in enumerate(functions)}
    rows = list(alternate(runs, 1))
    rows += alternate(runs, repeat * 10 if max(rows[0].values()) < 0.05 else repeat - 1)
    return [min(row[name] for row in rows) for name in runs]


def line(what: str, plain: str, ours: str, verdict: str) -> None:
    print(f"{what:38s} plain {plain:>12s}   rlscale {ours:>12s}   {verdict}", flush=True)


# --- advantages -----------------------------------------------------------------------------------------------------


def padded_whiten(x: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum()
    mean = (x * mask).sum() / n
    var = ((x - mean).square() * mask).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def padded_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    carry, following = torch.zeros(rewards.shape[0]), torch.zeros(rewards.shape[0])
    out = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        a = delta + gamma * lam * carry
        following = values[:, t] * m + (1 - m) * following
        carry = a * m + (1 - m) * carry
        out[:, t] = carry
    return padded_whiten(out, mask)


def padded_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    carry, out = torch.zeros(rewards.shape[0]), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        carry = (rewards[:, t] + gamma * carry) * mask[:, t] + carry * (1 - mask[:, t])
        out[:, t] = carry
    return padded_whiten(out * mask, mask)


def padded_grpo(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    score = (rewards * mask).sum(-1)
    a = torch.zeros_like(score)
    for g in group.unique():
        rows = group == g
        a[rows] = (score[rows] - score[rows].mean()) / (score[rows].std() + 1e-6)
    return a.unsqueeze(-1) * mask


def bench_advantages(repeat: int) -> None:
    """1,024 responses of 128 prompts, lognormal lengths to 8k."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.lognormal(6.5, 1.0, 1024).astype(np.int64).clip(16, 8192))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    group = torch.arange(1024) // 8
    t, width = int(cu[-1]), int(lengths.max())
    torch.manual_seed(0)
    values, rewards = torch.randn(t), torch.zeros(t)
    rewards[cu[1:] - 1] = torch.randn(1024)
    mask = (torch.rand(t) > 0.1).float()
    mask[cu[1:] - 1] = 1.0
    at = torch.repeat_interleave(torch.arange(1024) * width - cu[:-1], lengths) + torch.arange(t)

    def padded(x: Tensor) -> Tensor:
        out = torch.zeros(1024 * width)
        out[at] = x
        return out.view(1024, width)

    p_rewards, p_values, p_mask = padded(rewards), padded(values), padded(mask)

    def ours(name: str) -> Tensor:
        return estimate_advantages(
            name, token_rewards=rewards, mask=mask, cu_seqlens=cu, group=group, values=values, gamma=0.99, lam=0.95
        ).advantages

    plain = {
        "gae": lambda: padded_gae(p_rewards, p_values, p_mask, 0.99, 0.95),
        "grpo": lambda: padded_grpo(p_rewards, p_mask, group),
        "reinforce_plus_plus": lambda: padded_returns(p_rewards, p_mask, 0.99),
    }
    for name, f in plain.items():
        torch.testing.assert_close(f().view(-1)[at], ours(name), rtol=1e-3, atol=1e-3)
        a, b = least([f, lambda name=name: ours(name)], repeat)
        line(
            f"advantages {name}, {t:,} tokens",
            f"{a * 1e3:.1f} ms",
            f"{b * 1e3:.1f} ms",
            f"{a / b:.1f}x faster (needed 5x)",
        )


# --- partition and packing ------------------------------------------------------------------------------------------


def karmarkar_karp(costs: list[int], parts: int) -> list[list[int]]:
    """Largest differencing method for several parts, as usually written."""
    heap = [(-c, i, [(0, [])] * (parts - 1) + [(c, [i])]) for i, c in enumerate(costs)]
    heapq.heapify(heap)
    number = len(costs)
    while len(heap) > 1:
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted(((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)), key=lambda s: s[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
        number += 1
    return [p for _, p in heap[0][2]]


def bench_partition(repeat: int) -> None:
    """16,384 sequences over 64 ranks."""
    rng = np.random.default_rng(0)
    draws = {"lognormal": rng.lognormal(6.5, 1.0, 16384).clip(16, 8192), "uniform": rng.uniform(1, 8192, 16384)}
    for kind, drawn in draws.items():
        costs: list[int] = drawn.astype(np.int64).tolist()
        found: dict[str, list[list[int]]] = {}

        def plain(costs: list[int] = costs, found: dict[str, list[list[int]]] = found) -> None:
            found["kk"] = karmarkar_karp(costs, 64)

        def ours(costs: list[int] = costs, found: dict[str, list[list[int]]] = found) -> None:
            found["own"] = balanced_partition(costs, 64)

        a, b = least([plain, ours], min(repeat, 2))
        heavy = {k: max(sum(costs[i] for i in p) for p in parts) / (sum(costs) / 64) for k, parts in found.items()}
        verdict = f"{a / b:.1f}x faster (needed 10x); max/mean {heavy['own']:.7f} against {heavy['kk']:.7f}"
        line(f"partition 16,384 / 64, {kind}", f"{a * 1e3:.0f} ms", f"{b * 1e3:.0f} ms", verdict)


def bench_packing(repeat: int) -> None:
    """Token budgets of 8k to 64k on lognormal lengths."""
    rng = np.random.default_rng(0)
    for budget in (8192, 16384, 32768, 65536):
        costs = rng.lognormal(6.5, 1.0, 16384).clip(16, 8192).astype(np.int64).tolist()
        bound = -(-sum(costs) // budget)
        found: list[list[list[int]]] = []
        (seconds,) = least(
            [lambda budget=budget, costs=costs, found=found: found.append(pack_by_budget(costs, budget))], 1
        )
        line(
            f"packing 16,384 into {budget:,} tokens",
            f"{bound} (bound)",
            f"{len(found[0])}",
            f"{100 * (len(found[0]) / bound - 1):.2f}% above (needed 2%), {seconds * 1e3:.0f} ms",
        )


# --- head -----------------------------------------------------------------------------------------------------------


class Peak:
    """Highest resident memory while inside, above that at the start, sampled every millisecond."""

    def __enter__(self) -> Peak:
        self.start, self.top, self.stop = memory("VmRSS"), 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()

    def watch(self) -> None:
        while not self.stop:
            self.top = max(self.top, memory("VmRSS"))
            time.sleep(0.001)

    @property
    def extra(self) -> int:
        return max(self.top - self.start, 0)


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The usual way: all logits, in float32, log-softmax, gather."""
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)


def bench_head(
    dtype: torch.dtype, chunk: int, hidden_size: int = 576, vocabulary: int = 151_936, tokens: int = 2048
) -> None:
    """Forward and backward with both gradients; extra memory without the gradients themselves, which both return."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size) * 0.05).to(dtype).requires_grad_()
    targets, upstream = torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens)

    def run(f: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(f(), (hidden, weight), upstream))

    def plain() -> list[Tensor]:
        return run(lambda: full_logits(hidden, weight, targets))

    def ours() -> list[Tensor]:
        return run(lambda: vocab_parallel_logprob_entropy(hidden, weight, targets, chunk=chunk)[0])

    returned = (hidden.numel() + weight.numel()) * hidden.element_size()
    memory, results = [], []
    for f in (plain, ours):
        with Peak() as peak:
            results.append(f())
        memory.append(max(peak.extra - returned, 1))
    errors = [float((x.float() - y.float()).norm() / x.float().norm()) for x, y in zip(*results, strict=True)]
    assert max(errors) < (1e-5 if dtype == torch.float32 else 2e-2), errors
    del results
    a, b = least([plain, ours], 1)
    line(
        f"head {vocabulary:,} x {tokens:,}, {str(dtype)[6:]}, time",
        f"{a:.2f} s",
        f"{b:.2f} s",
        f"{b / a:.2f}x the time (needed 1.2x), chunk {chunk}",
    )
    line(
        f"head {vocabulary:,} x {tokens:,}, {str(dtype)[6:]}, memory",
        f"{memory[0] / 2**20:.0f} MiB",
        f"{memory[1] / 2**20:.0f} MiB",
        f"1/{memory[0] / memory[1]:.1f} of the memory (needed 1/8)",
    )


def main() -> None:
    """Entry point."""
    parts = ("advantages", "partition", "packing", "head")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each version; the least time counts")
    parser.add_argument("--only", default=",".join(parts), help=f"comma-separated parts of {', '.join(parts)}")
    parser.add_argument("--chunk", type=int, default=512, help="tokens per chunk of the head")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := [w for w in wanted if w not in parts]:
        parser.error(f"unknown part {unknown[0]}; known: {', '.join(parts)}")
    torch.set_num_threads(1)
    print(machine())
    if "advantages" in wanted:
        bench_advantages(args.repeat)
    if "partition" in wanted:
        bench_partition(args.repeat)
    if "packing" in wanted:
        bench_packing(args.repeat)
    if "head" in wanted:
        for dtype in (torch.float32, torch.bfloat16):
            bench_head(dtype, args.chunk)


if __name__ == "__main__":
    main()
