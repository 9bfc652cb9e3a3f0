"""Prompts: tokenizers, chat templates, where prompts come from, and the order in which they are drawn."""
