"""The prompts of a run: read, checked and tokenised once, then drawn in an order that can be continued anywhere.

The order is a pure function of seed and epoch, so the state of the sampler is two numbers. A batch goes over the border
of an epoch where it must: no prompt is dropped, each is drawn once an epoch.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlscale.data import files, reasoning_gym, tasks
from rlscale.data.tasks import RawPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.config.schema import DataConfig, SourceConfig

MAX_REPORTED = 10  # malformed rows shown; the others are counted
Cursor = tuple[int, int]  # epoch, position in it
_CHUNK = 1024  # conversations tokenised at a time


@dataclass
class Prompt:
    """One prompt, tokenised with its chat template and the opening of the answer."""

    index: int  # position in the data set
    uid: str  # source and row, e.g. 0:addition:17; unique in the data set
    messages: list[dict[str, Any]]
    token_ids: list[int]
    text: str  # what token_ids stand for, template included
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    scorer: str = ""  # spec of rlscale.reward.scorers, used where reward.scorer is null


class PromptData:
    """All prompts of some sources, and a sampler over them.

    Args:
        sources: where the prompts come from, concatenated in this order.
        cfg: lengths, column names, system prompt.
        tokenizer: a transformers tokenizer. Without a chat template, prompts must be texts.
        batch_size: prompts of `peek`; None where only `all` is used (validation).
        seed, shuffle: order of each epoch.
        name: key of `sources`, for messages to the user.

    Raises:
        ValueError: malformed rows or sources (all reported at once), nothing left to draw from, a batch larger than the
            data, or prompts longer than `max_prompt_length` where that is an error.
    """

    def __init__(
        self,
        sources: list[SourceConfig],
        cfg: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int | None,
        seed: int,
        shuffle: bool,
        name: str = "data.train",
    ):
        self.name, self.batch_size, self.seed, self.shuffle = name, batch_size, seed, shuffle
        prompts = _tokenise(_read(sources, cfg, name), cfg, tokenizer, name)
        self.prompts = _fitting(prompts, cfg, name)
        self.filtered = len(prompts) - len(self.prompts)
        if batch_size is not None and batch_size > len(self.prompts):
            raise ValueError(
                f"data.train_batch_size = {batch_size} is larger than {name}, which has {len(self.prompts)} prompts"
            )
        for index, prompt in enumerate(self.prompts):
            prompt.index = index
        self.epoch = 0
        self.position = 0  # within the epoch
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self.prompts)

    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the sources."""
        return list(self.prompts)

    def peek(self) -> tuple[list[Prompt], Cursor]:
        """The next `batch_size` prompts, and the position after them for `advance`; nothing has moved.

        Where an epoch ends within the batch, the next one begins there.
        """
        assert self.batch_size is not None, "made without a batch size"
        batch: list[Prompt] = []
        epoch, position, order = self.epoch, self.position, self._order
        while len(batch) < self.batch_size:
            if position == len(self.prompts):
                epoch, position = epoch + 1, 0
                order = self._order_of(epoch)
            taken = order[position : position + self.batch_size - len(batch)]
            batch += [self.prompts[i] for i in taken]
            position += len(taken)
        return batch, (epoch, position)

    def advance(self, cursor: Cursor) -> None:
        """Go on from a position of `peek`: what came with it has been used."""
        if cursor[0] != self.epoch:
            self._order = self._order_of(cursor[0])
        self.epoch, self.position = cursor

    def next_batch(self) -> list[Prompt]:
        """`peek` and `advance`, where nothing can come between them."""
        batch, cursor = self.peek()
        self.advance(cursor)
        return batch

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all prompt tokens in order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(f"{prompt.token_ids}\n".encode())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """All that decides what comes next, in plain values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; the batch size may be another one.

        Raises:
            ValueError: the state belongs to other prompts or another order.
        """
        own = self.state_dict()
        for key in ("size", "seed", "shuffle", "fingerprint"):
            if state[key] != own[key]:
                raise ValueError(
                    f"{self.name}: the checkpoint's data had {key} = {state[key]}, now it is {own[key]}; "
                    "continue with the same data, or start a new run from the weights"
                )
        self.advance((state["epoch"], state["position"]))

    def overlap(self, other: PromptData) -> int:
        """How many of the prompts of `other` are here too, token by token."""
        own = {tuple(prompt.token_ids) for prompt in self.prompts}
        return sum(tuple(prompt.token_ids) in own for prompt in other.prompts)


def _read(sources: list[SourceConfig], cfg: DataConfig, name: str) -> list[tuple[str, RawPrompt]]:
    """(uid, prompt) of all sources; every violation of all sources in one error."""
    found: list[tuple[str, RawPrompt]] = []
    errors: list[str] = []
    for number, source in enumerate(sources):
        count = len(source.chosen())
        if count != 1:
            errors.append(f"{name}[{number}]: set exactly one of task, reasoning_gym and files, not {count}")
            continue
        try:
            if source.task:
                label, prompts = source.task, tasks.make(source.task, source.size, source.seed, source.params)
            elif source.reasoning_gym:
                label = source.reasoning_gym
                prompts = reasoning_gym.make(label, source.size, source.seed, source.params)
            else:
                label, prompts = "files", files.read(source.files, cfg, errors)
        except ValueError as error:
            errors.append(f"{name}[{number}]: {error}")
            continue
        found += [(f"{number}:{label}:{row}", prompt) for row, prompt in enumerate(prompts)]
    if errors:
        more = f"\n  ... and {len(errors) - MAX_REPORTED} more" if len(errors) > MAX_REPORTED else ""
        raise ValueError(f"{name}: {len(errors)} malformed:\n  " + "\n  ".join(errors[:MAX_REPORTED]) + more)
    if not found:
        raise ValueError(f"{name} is empty: " + ("its sources have no prompts" if sources else "no sources are set"))
    return found


def _tokenise(
    raw: list[tuple[str, RawPrompt]], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> list[tuple[Prompt, str]]:
    """The prompts with their tokens, each with where it comes from. A text is one user turn, or goes as it is where the
    tokenizer has no chat template."""
    out: list[tuple[Prompt, str]] = []
    for start in range(0, len(raw), _CHUNK):
        chunk = raw[start : start + _CHUNK]
        conversations = [_conversation(prompt.messages, cfg.system_prompt) for _, prompt in chunk]
        texts = [
            _render(messages, prompt, tokenizer, name)
            for messages, (_, prompt) in zip(conversations, chunk, strict=True)
        ]
        encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        for (uid, prompt), messages, text, ids in zip(chunk, conversations, texts, encoded, strict=True):
            made = Prompt(
                -1, uid, messages, ids, text, prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.scorer
            )
            out.append((made, prompt.where))
    return out


def _conversation(messages: list[dict[str, Any]] | str, system_prompt: str | None) -> list[dict[str, Any]]:
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if system_prompt is not None and conversation[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system_prompt}, *conversation]
    return conversation


def _render(messages: list[dict[str, Any]], prompt: RawPrompt, tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    if tokenizer.chat_template:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template does
            raise ValueError(
                f"{prompt.where}: the chat template fails with {type(error).__name__}: {error} (model.chat_template)"
            ) from error
    if not isinstance(prompt.messages, str):
        raise ValueError(
            f"{name}: {prompt.where} is a conversation, but the tokenizer has no template: set model.chat_template"
        )
    return prompt.messages


def _fitting(prompts: list[tuple[Prompt, str]], cfg: DataConfig, name: str) -> list[Prompt]:
    """The prompts of at most `max_prompt_length` tokens."""
    limit = cfg.max_prompt_length
    fitting = [prompt for prompt, _ in prompts if len(prompt.token_ids) <= limit]
    if len(fitting) == len(prompts):
        return fitting
    long = [(where, len(prompt.token_ids)) for prompt, where in prompts if len(prompt.token_ids) > limit]
    listed = ", ".join(f"{where} ({length} tokens)" for where, length in long[:MAX_REPORTED])
    what = f"{name}: {len(long)} of {len(prompts)} prompts are longer than data.max_prompt_length = {limit}"
    if cfg.overlong_prompts == "error":
        raise ValueError(f"{what}: {listed}" + (", ..." if len(long) > MAX_REPORTED else ""))
    if not fitting:
        longest = max(length for _, length in long)
        raise ValueError(f"{what}, so that none is left; the longest has {longest} tokens")
    return fitting
