"""The prompts of a run: read, checked and tokenised once, then drawn in an order that can be continued anywhere.

The order is a pure function of seed and epoch. A batch goes over the border of an epoch where it must: no prompt is
dropped, each is drawn once per epoch.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import TYPE_CHECKING, Any

from rlscale.data import files, procedural, reasoning_gym
from rlscale.data.procedural import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.config.schema import DataConfig, SourceConfig

MAX_REPORTED = 10  # malformed rows shown; the others are counted
_CHUNK = 1024  # conversations tokenised at a time


class PromptData:
    """All prompts of some sources, and a sampler over them.

    Args:
        sources: where the prompts come from, concatenated in this order; each sets one of task, reasoning_gym, files.
        cfg: lengths, column names, system prompt.
        tokenizer: a transformers tokenizer. Without a chat template, prompts must be texts.
        batch_size: prompts of `peek`; None where only `prompts` is used (validation).
        seed, shuffle: order of each epoch.
        name: key of `sources`, for messages to the user.

    Attributes:
        prompts: all of them once, in the order of the sources.
        filtered: how many more were too long.

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
        self.name, self.batch_size, self.seed, self.shuffle = name, batch_size or 0, seed, shuffle
        prompts = _read(sources, cfg, name)
        _tokenise(prompts, cfg, tokenizer, name)
        self.prompts = _fitting(prompts, cfg, name)
        self.filtered = len(prompts) - len(self.prompts)
        if self.batch_size > len(self.prompts):
            raise ValueError(
                f"data.train_batch_size = {batch_size} is larger than {name}, which has {len(self.prompts)} prompts"
            )
        for index, prompt in enumerate(self.prompts):
            prompt.index = index
        self.drawn = 0  # prompts, since the first epoch began

    def __len__(self) -> int:
        return len(self.prompts)

    def peek(self) -> list[Prompt]:
        """The next `batch_size` prompts, beyond the end of an epoch where needed; `advance` moves to the ones after."""
        assert self.batch_size, "made without a batch size"
        order, seed = functools.partial(_order, len(self)), self.seed if self.shuffle else None
        places = (divmod(number, len(self)) for number in range(self.drawn, self.drawn + self.batch_size))
        return [self.prompts[order(epoch, seed)[position]] for epoch, position in places]

    def advance(self) -> None:
        """Move to the next batch: the prompts of `peek` have been used."""
        self.drawn += self.batch_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all prompt tokens in order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(f"{prompt.token_ids}\n".encode())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """All that decides what comes next, in plain values."""
        epoch, position = divmod(self.drawn, len(self))
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": len(self),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; the batch size may be another one.

        Raises:
            ValueError: the state belongs to other prompts or another order.
        """
        today = self.state_dict()
        for key in ("size", "seed", "shuffle", "fingerprint"):
            if state[key] != today[key]:
                raise ValueError(
                    f"{self.name}: the checkpoint's data had {key} = {state[key]}, now it is {today[key]}; "
                    "continue with the same data, or start a new run from the weights"
                )
        self.drawn = state["epoch"] * len(self) + state["position"]

    def overlap(self, other: PromptData) -> int:
        """How many of the prompts of `other` are here too, token by token."""
        known = {tuple(prompt.token_ids) for prompt in self.prompts}
        return sum(tuple(prompt.token_ids) in known for prompt in other.prompts)


@functools.lru_cache(maxsize=4)  # a batch may need two epochs, of the training data only
def _order(size: int, epoch: int, seed: int | None) -> list[int]:
    """The order of an epoch; None: that of the sources."""
    order = list(range(size))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _read(sources: list[SourceConfig], cfg: DataConfig, name: str) -> list[Prompt]:
    """The prompts of all sources with their uids; every violation of all sources in one error."""
    found: list[Prompt] = []
    errors: list[str] = []
    for number, source in enumerate(sources):
        try:
            if label := source.task or source.reasoning_gym:
                make = procedural.make if source.task else reasoning_gym.make
                prompts = make(label, source.size, source.seed, source.params)
            else:
                label, prompts = "files", files.read(source.files, cfg, errors)
        except ValueError as error:
            errors.append(f"{name}[{number}]: {error}")
            continue
        for row, prompt in enumerate(prompts):
            prompt.uid = f"{number}:{label}:{row}"
        found += prompts
    if errors:
        more = [f"... and {len(errors) - MAX_REPORTED} more"] if len(errors) > MAX_REPORTED else []
        head = f"{name}: {len(errors)} malformed rows or sources:"
        raise ValueError("\n  ".join([head, *errors[:MAX_REPORTED], *more]))
    if not found:
        raise ValueError(f"{name} is empty: " + ("its sources have no prompts" if sources else "no sources are set"))
    return found


def _tokenise(prompts: list[Prompt], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Add the system prompt where a conversation has none, text and tokens."""
    for start in range(0, len(prompts), _CHUNK):
        chunk = prompts[start : start + _CHUNK]
        for prompt in chunk:
            if cfg.system_prompt is not None and prompt.messages[0]["role"] not in ("system", "developer"):
                prompt.messages = [{"role": "system", "content": cfg.system_prompt}, *prompt.messages]
            prompt.text = _render(prompt, tokenizer, name)
        texts = [prompt.text for prompt in chunk]
        encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        for prompt, token_ids in zip(chunk, encoded, strict=True):
            prompt.token_ids = token_ids


def _render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """The conversation in the chat template, or a mere text as it is where the tokenizer has no template."""
    if tokenizer.chat_template:
        try:
            return str(tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template does
            raise ValueError(
                f"{prompt.where}: the chat template fails with {type(error).__name__}: {error} (model.chat_template)"
            ) from error
    if not prompt.text:
        raise ValueError(
            f"{name}: {prompt.where} is a conversation, but the tokenizer has no template: set model.chat_template"
        )
    return prompt.text


def _fitting(prompts: list[Prompt], cfg: DataConfig, name: str) -> list[Prompt]:
    """The prompts of at most `max_prompt_length` tokens."""
    limit = cfg.max_prompt_length
    long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    what = f"{name}: {len(long)} of {len(prompts)} prompts are longer than data.max_prompt_length = {limit}"
    if long and cfg.overlong_prompts == "error":
        listed = ", ".join(f"{prompt.where} ({len(prompt.token_ids)} tokens)" for prompt in long[:MAX_REPORTED])
        raise ValueError(f"{what}: {listed}" + (", ..." if len(long) > MAX_REPORTED else ""))
    if not fitting:
        longest = max(len(prompt.token_ids) for prompt in long)
        raise ValueError(f"{what}, so that none is left; the longest has {longest} tokens")
    return fitting
