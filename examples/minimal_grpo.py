"""GRPO in one file, on the parts of rlscale: read it from top to bottom.

    deepspeed --num_gpus 2 examples/minimal_grpo.py --yaml yamls/quickstart_cpu.yaml trainer.total_training_steps=10

The same parts make the real program. This file leaves out what a long run needs and an algorithm does not: checkpoints,
validation, signals, restarts of engines, scorer processes, the reference model, memory phases, metrics on disk.
`rlscale/loop/step.py` has the step with all of them.

Four ideas carry it:

* Every rank runs this file. Rank r holds a shard of the policy (Megatron under DeepSpeed ZeRO) and, on the same device,
  a worker of a vLLM engine.
* A batch is flat: the response tokens of all samples in one tensor, with `cu_seqlens`, identical on every rank. Group
  statistics and loss weights are computed from it without a collective.
* The loss is a sum weighted by counts of the whole batch, so that any division over micro-batches and ranks gives the
  same gradient.
* Weights reach the engines by a plan: which rank holds which slice of which tensor, and which worker lacks it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.config import ConfigError
from rlscale.loop.configure import Checked, configure  # imports nothing heavy: a misspelt key is reported at once


def reward(text: str, answer: str) -> float:
    """1 if the last number of the response is the answer. Replace this with the task of your own."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def group_advantages(rewards, group, eps: float = 1e-6):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): the reward of a response compared with those of its group.

    Args:
        rewards: ``[B]``, one score per response. group: ``[B]``, the prompt that each response answers.

    Returns:
        ``[B]``: ``(reward - mean of the group) / (std of the group + eps)``.
    """
    out = rewards.new_zeros(rewards.shape)
    for g in group.unique():
        of_group = rewards[group == g]
        out[group == g] = (of_group - of_group.mean()) / (of_group.std() + eps)
    return out


def clipped_loss(low: float, high: float):
    """PPO's clipped loss (Schulman et al. 2017, arXiv:1707.06347) of one micro-batch, as `Engine.update` calls it.

    It returns a weighted sum, and sums to be logged. With one optimizer step per batch the old policy is the current
    one: the ratio is 1, and its gradient is the policy gradient.
    """

    def loss_fn(out, micro):
        old = out.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        ratio = (out.logprobs - old).exp()
        gain = (ratio * micro.advantages).minimum(ratio.clamp(1 - low, 1 + high) * micro.advantages)
        return -(gain * micro.weights).sum(), {"entropy": (out.entropy * micro.weights).sum()}

    return loss_fn


def train(checked: Checked, device) -> list[float]:
    """Run ``trainer.total_training_steps`` steps of GRPO; returns the mean reward of each step."""
    import torch.distributed as dist

    from rlscale.batch.types import pack
    from rlscale.batch.weights import loss_weights
    from rlscale.data.dataset import PromptData
    from rlscale.data.tokenizers import eos_token_ids, load_tokenizer
    from rlscale.loop.models import build_model
    from rlscale.rollout.rollout import Rollout
    from rlscale.rollout.sampling import Sampling

    cfg = checked.cfg
    path, seed, steps = cfg.model.path, cfg.trainer.seed, cfg.trainer.total_training_steps or 10
    tokenizer = load_tokenizer(cfg.model)
    data = PromptData(cfg.data.train, cfg.data, tokenizer, cfg.data.train_batch_size, seed, cfg.data.shuffle)
    actor = build_model("actor", checked, device, steps, cfg.rollout.temperature)  # Megatron under DeepSpeed
    rollout = Rollout(cfg, device, eos_token_ids(path, tokenizer), tokenizer)
    history = []
    try:
        rollout.start()
        for step in range(1, steps + 1):
            began = time.monotonic()
            # 1. sample: the leaders claim prompts and return their shares; then every rank receives all responses
            prompts = data.peek()
            data.advance()
            sampling = Sampling(
                n=cfg.rollout.n, temperature=cfg.rollout.temperature, top_p=1.0, top_k=-1,
                max_tokens=cfg.data.max_response_length, seed=1000 * seed + step,
            )  # fmt: skip
            shares = [None] * device.world
            dist.all_gather_object(shares, rollout.generate(prompts, sampling))
            responses = sorted((t for s in shares for t in s), key=lambda t: (t.prompt_index, t.sample_index))
            rollout.sleep()  # on CUDA the engines drop their weights and caches, so that the trainer can use the memory

            # 2. score
            for response in responses:
                response.reward = reward(response.response_text, prompts[response.prompt_index].ground_truth)

            # 3. one flat batch, with an advantage and a loss weight per token
            batch = pack(responses)
            per_response = group_advantages(batch.rewards, batch.group)
            batch.advantages = per_response.repeat_interleave(batch.response_lengths)
            batch.weights = loss_weights(batch.mask, batch.cu_seqlens, cfg.actor.loss_agg_mode)

            # 4. update: one optimizer step; responses that cannot move the policy are not computed
            live = batch.select(per_response.nonzero().flatten())
            loss = clipped_loss(cfg.actor.clip_ratio_low, cfg.actor.clip_ratio_high)
            metrics = actor.update(live, loss, entropy=True)

            # 5. hand the new weights to the engines, which wakes them
            rollout.sync(lambda: (actor.layout, actor.tensors()))

            history.append(float(batch.rewards.mean()))
            if device.rank == 0:
                line = f"step {step:3}/{steps} | reward {history[-1]:.3f} | grad norm {metrics.get('grad_norm', 0):.3f}"
                print(f"{line} | {time.monotonic() - began:.1f} s", flush=True)
    finally:
        rollout.close()
    return history


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]  # which deepspeed adds
    if len(arguments) < 2 or arguments[0] != "--yaml":
        sys.exit(__doc__)
    try:
        checked = configure(arguments[1], arguments[2:], int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    from rlscale.cluster.device import init_distributed, prepare_process
    from rlscale.cluster.process import leave

    prepare_process(checked.kind)  # before torch is imported
    train(checked, init_distributed(checked.kind, checked.cfg.trainer.collective_timeout_s))
    leave()
