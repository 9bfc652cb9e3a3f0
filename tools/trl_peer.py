"""TRL's GRPOTrainer on the task of `yamls/quickstart_cpu.yaml`, at the setting that is its best on two CPU cores.

    MALLOC_MMAP_THRESHOLD_=2147483648 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=67108864 MALLOC_ARENA_MAX=1 \\
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/trl_peer.py --steps 6

The trainer is the stock one. Measured to be best among stock settings: two processes of one thread (one process of
two threads is slower), eager attention (scaled dot product attention is slower at this length), 16 sequences per
micro-batch, weights in bfloat16 without autocast, generation by `transformers` with its key-value cache, no gradient
checkpointing, no reference model. One JSON object per step goes to standard output, and to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed
PROMPTS, SAMPLES, NEW_TOKENS, PROCESSES = 8, 8, 32, 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of one forward and backward pass")
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--out", type=Path, help="file that receives the lines, too")
    return parser.parse_args()


def prompts(tokenizer: Any, steps: int, seed: int) -> list[dict[str, Any]]:
    """The prompts of our run's first steps as rows for TRL: prompt (chat), truth, question."""
    from rlscale.config.schema import DataConfig, SourceConfig
    from rlscale.data.dataset import PromptData

    data = PromptData(
        [SourceConfig(task="addition", size=4096, seed=1)],
        DataConfig(max_prompt_length=64),
        tokenizer,
        batch_size=PROMPTS,
        seed=seed,
        shuffle=True,
    )
    batches = []
    for _ in range(steps):
        batches.append(data.peek())
        data.advance()
    return [
        {"prompt": p.messages, "truth": str(p.ground_truth), "question": p.messages[-1]["content"]}
        for batch in batches
        for p in batch
    ]


class Counts:
    """What happens between two steps on this process; the reward function and the clock add to it."""

    def __init__(self) -> None:
        self.values = dict.fromkeys(("completion_tokens", "prompt_tokens", "reward", "generation"), 0.0)

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self.values[name] += value

    def take(self) -> dict[str, float]:
        taken, self.values = self.values, dict.fromkeys(self.values, 0.0)
        return taken


def reward_function(tokenizer: Any, counts: Counts) -> Callable[..., list[float]]:
    """Our reward of the task, which counts tokens, too."""
    from rlscale.reward.verifiers import last_number

    def reward(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        truth: list[str],
        question: list[str],
        **_: Any,
    ) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        scores = [
            last_number("addition", *row[:2], {"question": row[2]}) for row in zip(texts, truth, question, strict=True)
        ]
        asked = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
        counts.add(
            completion_tokens=sum(len(ids) for ids in completion_ids),
            prompt_tokens=sum(map(len, asked)),
            reward=sum(scores) / (PROMPTS * SAMPLES),
        )
        return scores

    return reward


def lines_after_steps(counts: Counts, out: Path | None) -> Any:
    """A callback of the trainer that writes one JSON object per step."""
    import torch
    from transformers import TrainerCallback

    class Lines(TrainerCallback):
        started = cpu = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, config: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.started
            mine = {**counts.take(), "cpu_seconds": time.process_time() - self.cpu}
            everyone: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, mine)
            if torch.distributed.get_rank() == 0:
                total = {k: sum(m[k] for m in everyone) for k in mine if k != "generation"}
                generation = max(m["generation"] for m in everyone)
                phases = {"generation": generation, "training": seconds - generation}
                line = {"step": state.global_step, "seconds": seconds, **total, "phases": phases}
                print(json.dumps(line), flush=True)
                if out:
                    with open(out, "a") as f:
                        f.write(json.dumps(line) + "\n")

    return Lines()


def settings(args: argparse.Namespace) -> Any:
    """The stock trainer's configuration."""
    from trl import GRPOConfig

    a_process = PROMPTS * SAMPLES // PROCESSES
    return GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": args.attention},
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=a_process // args.micro_batch,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=args.seed,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    args = arguments()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(1)
    tokenizer, counts = AutoTokenizer.from_pretrained(args.model, padding_side="left"), Counts()

    class Timed(GRPOTrainer):
        """The stock trainer with a clock around its generation."""

        def _generate(self, *a: Any, **k: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate(*a, **k)
            counts.add(generation=time.perf_counter() - started)
            return result

    trainer = Timed(
        model=args.model,
        reward_funcs=reward_function(tokenizer, counts),
        args=settings(args),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompts(tokenizer, args.steps, args.seed)),
        callbacks=[lines_after_steps(counts, args.out)],
    )
    trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
