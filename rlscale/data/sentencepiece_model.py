"""A transformers tokenizer around a bare SentencePiece model, with exactly SentencePiece's own ids.

transformers' conversion of such a file to its fast tokenizers drops the normalisation rules stored in the model (white
space and Unicode), so that the same text gets other ids than the ones the model was trained on.
"""

from __future__ import annotations

from pathlib import Path

from transformers.tokenization_utils_sentencepiece import SentencePieceBackend


class SentencePieceTokenizer(SentencePieceBackend):
    """Ids, pieces and special tokens of a `.model` file; control pieces in a text (chat template) mean their ids."""

    @classmethod
    def load(cls, path: Path) -> SentencePieceTokenizer:
        """Read a `.model` file; its unk, bos, eos and pad pieces become the special tokens (pad: else eos).

        Raises:
            ValueError: not a SentencePiece model.
        """
        from sentencepiece import SentencePieceProcessor

        try:
            model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} isn't a SentencePiece model: {error}") from error
        ids = {"unk_token": model.unk_id(), "bos_token": model.bos_id(), "eos_token": model.eos_id()}
        ids["pad_token"] = model.pad_id() if model.pad_id() >= 0 else model.eos_id()
        special = {name: model.id_to_piece(number) for name, number in ids.items() if number >= 0}
        return cls(vocab_file=str(path), **special)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces; byte pieces are joined to characters."""
        return str(self.sp_model.decode_pieces(tokens))
