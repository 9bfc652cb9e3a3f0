"""Prompts: tokenizers, chat templates, where prompts come from, and the order in which they are drawn."""

from rlscale.data.dataset import Prompt, PromptData
from rlscale.data.tokenizers import eos_token_ids, load_tokenizer

__all__ = ["Prompt", "PromptData", "eos_token_ids", "load_tokenizer"]
