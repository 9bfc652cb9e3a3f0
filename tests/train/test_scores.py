"""A reward model's score of a sequence equals that of transformers' classifier at its last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlscale.batch.types import Trajectory, pack
from rlscale.testing.batches import random_batch
from rlscale.testing.models import tiny_model
from tests import worlds
from tests.train.helpers import make_engine

LAYOUTS = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "ulysses2": (2, dict(ulysses_sequence_parallel_size=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForSequenceClassification

    path = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny_model("qwen2"), num_labels=1).save_pretrained(path)
    return str(path)


def batch(longest: int = 12) -> Any:
    """Ragged responses, one of them empty (the score is then that of the prompt)."""
    out = random_batch(groups=3, n=3, longest=longest)
    prompt = out.prompt_tokens[out.prompt_cu_seqlens[2] : out.prompt_cu_seqlens[3]].tolist()
    rows = []
    for i in range(out.num_samples):
        g = int(out.group[i])
        ids = out.tokens[out.cu_seqlens[i] : out.cu_seqlens[i + 1]].tolist()
        own = out.prompt_tokens[out.prompt_cu_seqlens[g] : out.prompt_cu_seqlens[g + 1]].tolist()
        rows.append(Trajectory(g, i, own, ids, [1] * len(ids), [0.0] * len(ids)))
    rows.append(Trajectory(2, 99, prompt, [], [], []))
    return pack(rows)


def expected(folder: str, data: Any) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for i in range(data.num_samples):
        g = int(data.group[i])
        prompt = data.prompt_tokens[data.prompt_cu_seqlens[g] : data.prompt_cu_seqlens[g + 1]]
        ids = torch.cat((prompt, data.tokens[data.cu_seqlens[i] : data.cu_seqlens[i + 1]]))
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state
            out.append(model.score(hidden)[0, -1, 0])
    return torch.stack(out)


def scored(folder: str, fields: dict[str, Any], data: Any, max_tokens: int) -> torch.Tensor:
    return make_engine(folder, fields, role="reward", optim=None, max_tokens=max_tokens).scores(data)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_equal_the_classifier(name: str, folder: str) -> None:
    world, fields = LAYOUTS[name]
    data = batch()
    longest = int((data.prompt_lengths[data.group] + data.response_lengths).max())
    wanted = expected(folder, data)
    assert wanted.std() > 0.01
    for result in worlds.run(world, scored, folder, fields, data, longest):  # a sequence may fill the whole budget
        torch.testing.assert_close(result, wanted, atol=2e-5, rtol=1e-5)
