"""Prompts out of tasks and files, the sampler's order, and every malformed row named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.config.schema import DataConfig, ModelConfig, SourceConfig
from rlscale.data import procedural, reasoning_gym
from rlscale.data.dataset import PromptData
from rlscale.data.tokenizers import load_tokenizer
from rlscale.testing.models import tiny_model

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]


def row(n: int = 0, **changes: Any) -> dict[str, Any]:
    """A row with veRL's columns."""
    made = {
        "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        "data_source": "mine",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig(path=tiny_model()))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def to(name: str, rows: list[Any]) -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return str(path)

    return to


def data(tokenizer: Any, *sources: SourceConfig, batch: int | None = None, seed: int = 1, shuffle: bool = True,
         **cfg: Any) -> PromptData:  # fmt: skip
    return PromptData(list(sources), DataConfig(**cfg), tokenizer, batch, seed, shuffle)


def test_prompt_is_tokenised_as_the_template_says(tokenizer: Any) -> None:
    prompts = data(tokenizer, SourceConfig(task="addition", size=20)).prompts
    for i, prompt in enumerate(prompts):
        expected = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        assert prompt.token_ids == expected and all(isinstance(token, int) for token in prompt.token_ids)
        assert prompt.text.endswith("assistant\n") and tokenizer.decode(prompt.token_ids) == prompt.text
        assert (prompt.index, prompt.uid, prompt.scorer) == (i, f"0:addition:{i}", "last_number")


def test_template_alone_decides_about_special_tokens(write: Callable[..., str]) -> None:
    """A tokenizer that starts every text with a special token doesn't do so where the template has written the text."""
    from tokenizers.processors import TemplateProcessing

    starting = load_tokenizer(ModelConfig(path=tiny_model()))
    bos = starting.eos_token_id
    starting.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{starting.eos_token} $A", special_tokens=[(starting.eos_token, bos)]
    )
    assert starting("x")["input_ids"][0] == bos
    (prompt,) = data(starting, SourceConfig(task="addition", size=1)).prompts
    assert prompt.token_ids[0] != bos
    starting.chat_template = None
    (prompt,) = data(starting, SourceConfig(files=[write("a.jsonl", [row(prompt="3 + 4 =")])])).prompts
    assert prompt.token_ids == [bos, *starting("3 + 4 =", add_special_tokens=False)["input_ids"]]


def test_addition_is_right_and_splits_are_disjoint(tokenizer: Any) -> None:
    made = {split: procedural.make("addition", 200, 0, {"split": split}) for split in ("train", "val")}
    texts = {}
    for split, prompts in made.items():
        for prompt in prompts:
            question = prompt.messages[0]["content"].split("?")[0].removeprefix("What is ")
            assert int(prompt.ground_truth) == sum(map(int, question.split(" + ")))
        texts[split] = [prompt.messages[0]["content"] for prompt in prompts]
    assert len(set(texts["train"])) == 63 and len(set(texts["val"])) == 37
    assert len(set(texts["train"]) | set(texts["val"])) == 100
    assert set(Counter(texts["val"][:37]).values()) == {1}  # no repetition before all have been drawn
    train = data(tokenizer, SourceConfig(task="addition", size=300, seed=0))
    held_out = data(tokenizer, SourceConfig(task="addition", size=37, seed=0, params={"split": "val"}))
    assert train.overlap(held_out) == 0 and train.overlap(train) == 300


def test_addition_of_more_digits() -> None:
    train = procedural.make("addition", 500, 1, {"digits": 3, "template": "{a}+{b}="})
    val = procedural.make("addition", 500, 2, {"digits": 3, "template": "{a}+{b}=", "split": "val"})
    texts = [[prompt.messages[0]["content"] for prompt in part] for part in (train, val)]
    assert len(set(texts[0])) == len(set(texts[1])) == 500 and not set(texts[0]) & set(texts[1])
    assert any(len(text) == 8 for text in texts[0])
    assert procedural.make("addition", 500, 1, {"digits": 3, "template": "{a}+{b}="}) == train
    assert procedural.make("addition", 500, 3, {"digits": 3, "template": "{a}+{b}="}) != train


def test_reasoning_gym_seeds_do_not_overlap() -> None:
    parts = [[p.messages[0]["content"] for p in reasoning_gym.make("chain_sum", 100, seed, {})] for seed in (0, 1)]
    assert len(set(parts[0]) & set(parts[1])) < 5
    assert parts[0] == [p.messages[0]["content"] for p in reasoning_gym.make("chain_sum", 100, 0, {})]
    assert parts[0][0].endswith("between <answer> and </answer>.")


def test_importing_reasoning_gym_warns_of_nothing(tmp_path: Path) -> None:
    code = "import sys, rlscale.data.dataset as d; assert 'reasoning_gym' not in sys.modules; d.reasoning_gym.package()"
    compiled_anew = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", code]
    ended = subprocess.run(compiled_anew, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and "SyntaxWarning" not in ended.stderr, ended.stderr


def test_every_reasoning_gym_task_makes_prompts() -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - {"composite"}):  # composite needs to be told of what
        (prompt,) = reasoning_gym.make(name, 1, 1, {"instruction": ""})
        assert prompt.messages and prompt.scorer == "reasoning_gym"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_with_the_columns_of_verl(tokenizer: Any, write: Callable[..., str], kind: str) -> None:
    files = [
        write(f"a.{kind}", [row(0, prompt=CHAT), row(1)]),
        write(f"b.{kind}", [row(2, data_source="openai/gsm8k")]),
    ]
    prompts = data(tokenizer, SourceConfig(files=files), SourceConfig(task="addition", size=1)).prompts
    assert [prompt.ground_truth for prompt in prompts[:3]] == ["1", "2", "3"]
    assert [prompt.data_source for prompt in prompts] == ["mine", "mine", "openai/gsm8k", "addition"]
    assert prompts[0].messages == CHAT and prompts[1].extra_info == {"index": 1, "split": "train"}
    assert prompts[2].scorer == "source:openai/gsm8k"
    assert len({prompt.uid for prompt in prompts}) == 4 and [prompt.index for prompt in prompts] == [0, 1, 2, 3]


def test_column_names_dotted_keys_and_texts(tokenizer: Any, write: Callable[..., str]) -> None:
    rows = [{"q": "What is 1 + 1?", "meta": {"name": "x", "deep": {"er": {"answer": 2}}}, "meta.name": "literal first"}]
    keys = {
        "prompt_key": "q",
        "data_source_key": "meta.name",
        "ground_truth_key": "meta.deep.er.answer",
        "extra_info_key": "meta.deep",
    }
    (prompt,) = data(tokenizer, SourceConfig(files=[write("a.jsonl", rows)]), **keys).prompts
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("literal first", 2, {"er": {"answer": 2}})
    assert prompt.messages == [{"role": "user", "content": "What is 1 + 1?"}]
    (prompt,) = data(tokenizer, SourceConfig(files=[write("name.jsonl", [row(data_source=None) | {"d": 1}])]),
                     data_source_key="none").prompts  # fmt: skip
    assert prompt.data_source == "name"


def test_system_prompt_is_put_before_conversations_without_one(tokenizer: Any, write: Callable[..., str]) -> None:
    file = write("a.jsonl", [row(prompt=CHAT), row(), row(prompt="text")])
    prompts = data(tokenizer, SourceConfig(files=[file]), system_prompt="Think.").prompts
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Be brief.", "Think.", "Think."]
    assert [len(prompt.messages) for prompt in prompts] == [2, 2, 2] and "Think." in prompts[2].text


def test_without_a_chat_template_texts_go_as_they_are(write: Callable[..., str]) -> None:
    plain = load_tokenizer(ModelConfig(path=tiny_model()))
    plain.chat_template = None
    (prompt,) = data(plain, SourceConfig(files=[write("a.jsonl", [row(prompt="3 + 4 =")])])).prompts
    assert prompt.token_ids == plain("3 + 4 =")["input_ids"] and prompt.text == "3 + 4 ="
    with pytest.raises(ValueError, match=r"b.jsonl:1 is a conversation, but .* set model.chat_template"):
        data(plain, SourceConfig(files=[write("b.jsonl", [row()])]))


MALFORMED = {
    "{broken": "not JSON",
    "[1, 2]": "a row is an object with columns, not a list",
    '{"prompt": "x"}': "no 'reward_model.ground_truth' (data.ground_truth_key) among the columns prompt",
    json.dumps({k: v for k, v in row().items() if k != "prompt"}): "no 'prompt' (data.prompt_key)",
    json.dumps(row(prompt=[])): "'prompt' (data.prompt_key) is empty",
    json.dumps(row(prompt=3)): "'prompt' (data.prompt_key) is a number",
    json.dumps(row(prompt=[{"role": "alien", "content": "x"}])): "message 0 of 'prompt' has the role 'alien'",
    json.dumps(row(prompt=[*CHAT, {"role": "user"}])): "message 2 of 'prompt' has null as its content, not a text",
    json.dumps(row(prompt=["x"])): "message 0 of 'prompt' has the role None",
    json.dumps(row(prompt=[*CHAT, {"role": "assistant", "content": "7"}])): "'prompt' ends with an assistant message",
    json.dumps(row(data_source=7)): "'data_source' (data.data_source_key) is a number",
    json.dumps(row(extra_info=[1])): "'extra_info' (data.extra_info_key) is a list",
}


@pytest.mark.parametrize("line", list(MALFORMED))
def test_malformed_row_is_named(tokenizer: Any, write: Callable[..., str], line: str) -> None:
    file = write("rows.jsonl", [row(), "", line, row()])
    with pytest.raises(ValueError) as error:
        data(tokenizer, SourceConfig(files=[file]))
    assert f"{file}:3: {MALFORMED[line]}" in str(error.value)
    assert str(error.value).startswith("data.train: 1 malformed rows or sources")


def test_many_violations_are_reported_together(tokenizer: Any, write: Callable[..., str], tmp_path: Path) -> None:
    file = write("rows.jsonl", [row(), *["{"] * 13])
    parquet = write("rows.parquet", [row(), row(prompt=[])])
    (tmp_path / "fake.parquet").write_text("no")
    with pytest.raises(ValueError) as error:
        data(
            tokenizer, SourceConfig(task="additoin"), SourceConfig(files=[file]), SourceConfig(files=["x.csv", parquet])
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "data.train: 16 malformed rows or sources:"
    assert lines[-1].strip() == "... and 6 more" and len(lines) == 12
    assert "did you mean 'addition'?" in lines[1] and f"{file}:2: not JSON" in lines[2]
    with pytest.raises(ValueError) as error:
        data(tokenizer, SourceConfig(files=["x.csv", str(tmp_path), parquet, str(tmp_path / "fake.parquet")]))
    message = str(error.value)
    assert "x.csv: no such file" in message and f"{parquet}:2: 'prompt'" in message
    assert "fake.parquet:1: not readable as Parquet" in message and f"{tmp_path}: no such file" in message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SourceConfig(task="addition", params={"digit": 2}), "params of task 'addition': got an unexpected keyword"),
        (SourceConfig(task="addition", params={"split": "test"}), "split is 'test'"),
        (SourceConfig(task="addition", params={"digits": 0}), "digits is 0"),
        (SourceConfig(reasoning_gym="chainsum"), "no task 'chainsum': did you mean chain_sum"),
        (SourceConfig(reasoning_gym="chain_sum", params={"max_terms": -3}), "reasoning_gym task 'chain_sum'"),
        (SourceConfig(reasoning_gym="chain_sum", params={"no": 1}), "reasoning_gym task 'chain_sum'"),
    ],
)
def test_bad_sources(tokenizer: Any, source: SourceConfig, message: str) -> None:
    with pytest.raises(ValueError) as error:
        data(tokenizer, source)
    assert message in str(error.value)


def test_empty_and_too_small_data(tokenizer: Any, write: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="data.train is empty: no sources"):
        data(tokenizer)
    with pytest.raises(ValueError, match="data.train is empty: its sources have no prompts"):
        data(tokenizer, SourceConfig(files=[write("empty.jsonl", [])]))
    with pytest.raises(ValueError, match="data.train_batch_size = 5 is larger than data.train, which has 4 prompts"):
        data(tokenizer, SourceConfig(task="addition", size=4), batch=5)


def test_overlong_prompts_are_filtered_or_refused(tokenizer: Any, write: Callable[..., str]) -> None:
    file = write("a.jsonl", [row(0), row(1, prompt="long " * 50), row(2), row(3, prompt="longer " * 60)])
    lengths = [len(p.token_ids) for p in data(tokenizer, SourceConfig(files=[file])).prompts]
    limit = max(lengths[0], lengths[2])
    made = data(tokenizer, SourceConfig(files=[file]), max_prompt_length=limit)
    assert (made.filtered, len(made)) == (2, 2)
    assert [(p.index, p.ground_truth) for p in made.prompts] == [(0, "1"), (1, "3")]
    with pytest.raises(ValueError) as error:
        data(tokenizer, SourceConfig(files=[file]), max_prompt_length=limit, overlong_prompts="error")
    assert f"2 of 4 prompts are longer than data.max_prompt_length = {limit}" in str(error.value)
    assert f"{file}:2 ({lengths[1]} tokens)" in str(error.value) and f"{file}:4" in str(error.value)
    with pytest.raises(ValueError, match=f"none is left; the longest has {max(lengths)} tokens"):
        data(tokenizer, SourceConfig(files=[file]), max_prompt_length=2)


def indices(made: PromptData, batches: int) -> list[list[int]]:
    taken = []
    for _ in range(batches):
        taken.append([prompt.index for prompt in made.peek()])
        assert [prompt.index for prompt in made.peek()] == taken[-1], "to look moves nothing"
        made.advance()
    return taken


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 12),
    batch=st.integers(1, 12),
    cut=st.integers(0, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_resumed_order_is_the_unbroken_one(
    tokenizer: Any, size: int, batch: int, cut: int, shuffle: bool, seed: int
) -> None:
    """Every prompt once an epoch, batches over epoch borders, and a state taken anywhere continues exactly."""
    batch = min(batch, size)

    def fresh() -> PromptData:
        return data(tokenizer, SourceConfig(task="addition", size=size), batch=batch, seed=seed, shuffle=shuffle)

    unbroken = indices(fresh(), cut + 15)
    assert all(len(taken) == batch for taken in unbroken)
    flat = [index for taken in unbroken for index in taken]
    for start in range(0, len(flat) - size + 1, size):
        assert sorted(flat[start : start + size]) == list(range(size))
        assert shuffle or flat[start : start + size] == list(range(size))
    first = fresh()
    assert indices(first, cut) == unbroken[:cut]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert indices(second, 15) == unbroken[cut:]


def test_epochs_and_seeds_have_orders_of_their_own(tokenizer: Any) -> None:
    source = SourceConfig(task="addition", size=30)
    orders = [indices(data(tokenizer, source, batch=30, seed=seed), 3) for seed in (1, 2)]
    assert len({tuple(order) for seed in orders for order in seed}) == 6
    assert indices(data(tokenizer, source, batch=30, seed=1), 3) == orders[0]


def test_batch_size_may_change_on_resume(tokenizer: Any) -> None:
    source = SourceConfig(task="addition", size=10)
    flat = [i for taken in indices(data(tokenizer, source, batch=2), 15) for i in taken]
    first, second = data(tokenizer, source, batch=4), data(tokenizer, source, batch=6)
    taken = indices(first, 3)
    second.load_state_dict(first.state_dict())
    assert [i for batch in taken + indices(second, 3) for i in batch] == flat[:30]


def test_state_of_other_data_is_refused(tokenizer: Any) -> None:
    state = data(tokenizer, SourceConfig(task="addition", size=10), batch=2).state_dict()
    for other, key in [
        (data(tokenizer, SourceConfig(task="addition", size=11), batch=2), "size"),
        (data(tokenizer, SourceConfig(task="addition", size=10), batch=2, seed=2), "seed"),
        (data(tokenizer, SourceConfig(task="addition", size=10), batch=2, shuffle=False), "shuffle"),
        (data(tokenizer, SourceConfig(task="addition", size=10, seed=5), batch=2), "fingerprint"),
    ]:
        with pytest.raises(ValueError, match=f"data.train: the checkpoint's data had {key} = "):
            other.load_state_dict(state)


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procedural, "GENERATORS", {})
    assert procedural.register("mine")(procedural.addition) is procedural.addition
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        procedural.register("mine")(lambda size, seed: [])
    assert procedural.GENERATORS == {"mine": procedural.addition}
