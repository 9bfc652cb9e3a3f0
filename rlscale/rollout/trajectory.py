"""How one trajectory is sampled, given a way to ask the engine.

`sample_trajectory` asks once. An agent's function of the same signature asks as often as it likes; what it returns is
append-only: ``prompt_ids`` as they were given, and in ``response_ids`` the tokens of the policy, with mask 1 and the
log-probs that came with them, and those of the environment, with mask 0 and log-prob 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlscale.batch.types import Trajectory
from rlscale.rollout.backend import Generate
from rlscale.rollout.sampling import Sampling

if TYPE_CHECKING:
    from rlscale.data.dataset import Prompt

Sampler = Callable[["Prompt", Sampling, int, Generate], Awaitable[Trajectory]]


async def sample_trajectory(prompt: Prompt, sampling: Sampling, seed: int, generate: Generate) -> Trajectory:
    """One response to one prompt, drawn with ``seed``. `Rollout` fills in its place in the step and its text."""
    output = await generate(prompt.token_ids, replace(sampling, n=1, seed=seed))
    return Trajectory(
        prompt_index=0, sample_index=0, prompt_ids=prompt.token_ids, response_ids=output.token_ids,
        response_mask=[1] * len(output.token_ids), rollout_logprobs=output.logprobs,
        finish_reason=output.finish_reason, prompt_text=prompt.text, data_source=prompt.data_source,
    )  # fmt: skip
